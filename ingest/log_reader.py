"""Reading and freeing the embedded log, from the serving process or from any other.

Every call opens the files it needs and closes them again: nothing is held in between, and a freed
file leaves the disk at once. Files that another process frees meanwhile are looked up again.
"""

import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from draftkeep import files
from draftkeep.errors import StoreError
from draftkeep.ingest.log import LogRecord, PartitionId
from draftkeep.ingest.log_files import (
    LogFile,
    State,
    delete_rows,
    directory_bytes,
    list_files,
    opened,
    read_state,
    remove_files,
    sweep_strays,
)

_ATTEMPTS = 16

_T = TypeVar("_T")


class LogReader:
    """Everything a `Log` does except to append."""

    def __init__(self, directory: Path) -> None:
        """Raises StoreError where `directory` holds no log."""
        self._directory = directory
        self.identity()

    @property
    def name(self) -> str:
        """The name of the log's directory."""
        return self._directory.name

    def append(self, records: Sequence[bytes]) -> int:
        """Always raises StoreError: the process that serves is the only one that appends."""
        raise StoreError("this log was opened for reading; append in the process that serves")

    def close(self) -> None:
        """Nothing is held."""

    def read(self, start: int, limit_records: int, limit_bytes: int) -> list[LogRecord]:
        """See `Log.read`. Files freed meanwhile are skipped as if freed before."""
        return self._settled(lambda: self._read(start, limit_records, limit_bytes))

    def free(self, up_to: int) -> None:
        """See `Log.free`. Whole files below are unlinked; rows below in the rest are zeroed.

        Other processes that have a file open keep it until they close it. Deleted rows leave the
        write-ahead log with the next checkpoint, which a busy reader can put off.
        """
        self._settled(lambda: self._free(up_to))

    def expire(self, before_s: float) -> int:
        """Give up, like `free`, what was appended before `before_s`; returns how many records.

        Nothing behind a younger record goes, whatever the clock was when it was appended.
        """
        return self._settled(lambda: self._expire(before_s))

    def bounds(self) -> tuple[int, int]:
        """See `Log.bounds`."""
        return self._settled(self._bounds)

    def size_bytes(self) -> int:
        """All files of the directory, write-ahead logs and free pages included."""
        return directory_bytes(self._directory)

    def identity(self) -> PartitionId:
        """Two random names drawn when the log was made, and partition 0."""
        state = self._settled(lambda: self._state(self._files()))
        return PartitionId(cluster=state.cluster, topic_id=state.topic, partition=0)

    def _settled(self, action: Callable[[], _T]) -> _T:
        """Run `action` until no file came or went under its hands."""
        for attempt in range(1, _ATTEMPTS + 1):
            before = self._files()
            try:
                return action()
            except sqlite3.Error as error:
                if attempt == _ATTEMPTS or self._files() == before:
                    raise StoreError(
                        f"the log in {self._directory} cannot be read ({error}); check "
                        "permissions there, or move the directory aside to begin a new log"
                    ) from error
        raise AssertionError("the last attempt returns or raises")

    def _files(self) -> list[LogFile]:
        try:
            log_files = list_files(self._directory)
        except FileNotFoundError:
            log_files = []
        if not log_files:
            raise StoreError(f"there is no log in {self._directory}; start the serving node first")
        return log_files

    def _state(self, log_files: list[LogFile]) -> State:
        with opened(log_files[-1]) as connection:
            return read_state(connection)

    def _bounds(self) -> tuple[int, int]:
        *older, newest = self._files()
        # One statement, one snapshot: between two, an append could slip past both.
        query = "SELECT (SELECT min(id) FROM records), next FROM state"
        for file in older:
            with opened(file) as connection:
                first, _ = connection.execute(query).fetchone()
            if first is not None:
                return first, self._state([newest]).next
        with opened(newest) as connection:
            first, following = connection.execute(query).fetchone()
        return (following if first is None else first), following

    def _read(self, start: int, limit_records: int, limit_bytes: int) -> list[LogRecord]:
        log_files = self._files()
        records: list[LogRecord] = []
        for file, end in zip(log_files, _ends(log_files), strict=True):
            if end is not None and end <= start:
                continue
            full = _read_file(file, start, limit_records, limit_bytes, records)
            if full:
                return records
        if not records and start > (following := self._state(log_files).next):
            raise StoreError(
                f"reading from offset {start}, but the log ends at {following}: the offset "
                "belongs to another log, or this one was restored from a copy"
            )
        return records

    def _free(self, up_to: int) -> None:
        following = self._state(self._files()).next
        if up_to > following:
            raise StoreError(f"freeing up to offset {up_to}, but the log ends at {following}")
        log_files = self._files()
        for file, end in zip(log_files, _ends(log_files), strict=True):
            if end is not None and end <= up_to:
                remove_files(file.path)
            elif file.first < up_to:
                with opened(file) as connection:
                    delete_rows(connection, up_to)
        sweep_strays(self._directory)
        files.sync(self._directory)

    def _expire(self, before_s: float) -> int:
        # Up to the first that is young enough: one behind it may only look older, where the clock
        # was set back.
        query = """
            SELECT count(*), max(id) FROM records WHERE id <
            coalesce((SELECT min(id) FROM records WHERE appended_s >= ?), 9223372036854775807)
        """
        expired, last = 0, -1
        for file in self._files():
            if file.start_s >= before_s:
                break
            with opened(file) as connection:
                count, newest = connection.execute(query, (before_s,)).fetchone()
                (young,) = connection.execute(
                    "SELECT EXISTS (SELECT 1 FROM records WHERE appended_s >= ?)", (before_s,)
                ).fetchone()
            if count:
                expired, last = expired + count, newest
            if young:
                break
        if expired:
            self._free(last + 1)
        return expired


def _ends(log_files: list[LogFile]) -> list[int | None]:
    """For each file the offset at which the next one starts; None for the newest."""
    return [*(file.first for file in log_files[1:]), None]


def _read_file(
    file: LogFile, start: int, limit_records: int, limit_bytes: int, records: list[LogRecord]
) -> bool:
    """Add its rows from `start` on to `records`; True when a limit was reached."""
    taken_bytes = sum(len(record.data) for record in records)
    query = "SELECT id, data, appended_s FROM records WHERE id >= ? ORDER BY id"
    with opened(file) as connection:
        for offset, data, appended_s in connection.execute(query, (start,)):
            taken_bytes += len(data)
            if records and (len(records) >= limit_records or taken_bytes > limit_bytes):
                return True
            if records and offset != records[-1].offset + 1:
                raise sqlite3.DatabaseError(f"offset {records[-1].offset + 1} is missing")
            records.append(LogRecord(offset=offset, data=data, appended_s=appended_s))
    return False
