"""Group commit: one thread writes for all callers, so that concurrent appends share an fsync.

While one commit waits for the disk the next callers queue up; what has gathered becomes the next
transaction. There is no timer: a lone caller waits for one fsync, a crowd shares one.
"""

import contextlib
import fcntl
import sqlite3
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from draftkeep.errors import LogFullError, StoreError
from draftkeep.ingest.log_files import (
    PAGE_BYTES,
    LogFile,
    State,
    connect,
    create_file,
    directory_bytes,
    list_files,
    read_state,
    sweep_strays,
    truncate_wal,
)

_GROUP_RECORDS = 1024
_GROUP_BYTES = 16 * 1024**2
# A busy hour does not fill one file: freeing unlinks files and rewrites a part of one at most.
_FILE_BYTES = 32 * 1024**2
# Row header and cell pointer, rounded up; and pages that any commit may touch beside its rows.
_ROW_BYTES = 32
_COMMIT_PAGES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Append:
    records: tuple[bytes, ...]
    bytes_: int
    offset: Future[int] = field(default_factory=Future)

    def succeed(self, offset: int) -> None:
        # An append that `close` gave up on has its answer already; the same goes for `fail`.
        with contextlib.suppress(InvalidStateError):
            self.offset.set_result(offset)

    def fail(self, error: StoreError) -> None:
        with contextlib.suppress(InvalidStateError):
            self.offset.set_exception(error)


class GroupWriter:
    """The only writer of a log directory, from construction to `close`.

    Owns the lock file, the newest file and the thread. Raises StoreError where another
    process writes to the directory or its files are damaged.
    """

    def __init__(
        self,
        directory: Path,
        *,
        cap_bytes: int,
        bucket_s: int,
        clock: Callable[[], float],
        random: Callable[[int], bytes],
    ) -> None:
        self._directory = directory
        self._cap_bytes = cap_bytes
        self._bucket_s = bucket_s
        self._clock = clock
        self._connection: sqlite3.Connection | None = None
        self._next = 0
        self._waiting: deque[_Append] = deque()
        self._committing: list[_Append] = []
        self._changed = threading.Condition()
        self._closed = False
        self._lock = _lock_directory(directory)
        try:
            sweep_strays(directory)
            if not list_files(directory):
                identity = State(cluster=random(16).hex(), topic=random(16).hex(), next=0)
                create_file(directory, self._stretch_start_s(), identity)
            self._open_newest()
        except (sqlite3.Error, OSError, StoreError) as error:
            self._lock.close()
            raise _explain(directory, error) from error
        self._thread = threading.Thread(target=self._run, name="log-writer", daemon=True)
        self._thread.start()

    def append(self, records: Sequence[bytes]) -> int:
        """Queue the records, wait for the commit that holds them, return the first offset."""
        append = _Append(
            records=tuple(records), bytes_=sum(len(record) + _ROW_BYTES for record in records)
        )
        with self._changed:
            if self._closed:
                raise StoreError("the log was closed; open it again to append")
            self._waiting.append(append)
            self._changed.notify_all()
        return append.offset.result()

    @property
    def waiting(self) -> int:
        """How many appends are queued behind the commit under way."""
        with self._changed:
            return len(self._waiting)

    def close(self, timeout_s: float | None = None) -> None:
        """Commit what is queued, stop the thread and let go of the directory.

        Where that takes longer than `timeout_s` (a disk that hangs; None waits for ever), appends
        without an answer fail with StoreError and this returns. Some of them may be written all
        the same. The thread is a daemon and keeps the directory locked until the disk answers or
        the process ends.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._abandon(timeout_s)

    def _abandon(self, timeout_s: float | None) -> None:
        with self._changed:
            unanswered = [*self._committing, *self._waiting]
            self._waiting.clear()
        for append in unanswered:
            append.fail(
                StoreError(
                    f"the log in {self._directory} was closed and its disk did not answer within "
                    f"{timeout_s} s; the records may or may not be written: check the disk"
                )
            )

    def _run(self) -> None:
        try:
            while group := self._take():
                try:
                    self._commit(group)
                except Exception as error:  # A dead thread would leave every caller waiting.
                    self._close_connection()
                    for append in group:
                        append.fail(_explain(self._directory, error))
        finally:
            self._close_connection()
            self._lock.close()

    def _take(self) -> list[_Append]:
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            group: list[_Append] = []
            records = bytes_ = 0
            while self._waiting and records < _GROUP_RECORDS and bytes_ < _GROUP_BYTES:
                append = self._waiting.popleft()
                group.append(append)
                records += len(append.records)
                bytes_ += append.bytes_
            self._committing = group
            return group

    def _commit(self, group: list[_Append]) -> None:
        if self._connection is None:
            self._open_newest()
        self._roll_if_due(_growth_bytes(sum(append.bytes_ for append in group)))
        fitting = self._admit(group)
        firsts = self._insert(fitting)
        for append, first in zip(fitting, firsts, strict=True):
            append.succeed(first)

    def _admit(self, group: list[_Append]) -> list[_Append]:
        """Refuse, one by one, the appends that could take the directory past its cap."""
        room = self._room_bytes()
        if _growth_bytes(sum(append.bytes_ for append in group)) > room:
            truncate_wal(self._open())
            room = self._room_bytes()
        fitting: list[_Append] = []
        taken_bytes = 0
        for append in group:
            if _growth_bytes(taken_bytes + append.bytes_) <= room:
                taken_bytes += append.bytes_
                fitting.append(append)
            else:
                append.fail(self._refusal(append.bytes_, room))
        return fitting

    def _refusal(self, append_bytes: int, room: int) -> LogFullError:
        return LogFullError(
            f"an append of {append_bytes} bytes can take {_growth_bytes(append_bytes)} on disk and "
            f"{room} of the log's {self._cap_bytes} are left; see whether the compactor, or the "
            "forwarder to Kafka, keeps up, or raise log.cap_bytes"
        )

    def _room_bytes(self) -> int:
        """What may still be written; pages in the write-ahead log are yet to reach the file."""
        pages: int = self._open().execute("PRAGMA page_count").fetchone()[0]
        in_wal_only = max(0, pages * PAGE_BYTES - self._file.path.stat().st_size)
        return self._cap_bytes - directory_bytes(self._directory) - in_wal_only

    def _insert(self, appends: list[_Append]) -> list[int]:
        """Write all rows in one durable transaction; the next offset moves only with them."""
        connection = self._open()
        firsts = []
        following = self._next
        now_s = self._clock()
        connection.execute("BEGIN IMMEDIATE")
        for append in appends:
            firsts.append(following)
            rows = ((following + i, now_s, data) for i, data in enumerate(append.records))
            connection.executemany("INSERT INTO records VALUES (?, ?, ?)", rows)
            following += len(append.records)
        connection.execute("UPDATE state SET next = ?", (following,))
        connection.execute("COMMIT")
        self._next = following
        return firsts

    def _roll_if_due(self, need_bytes: int) -> None:
        """Begin another file where the present one is of an earlier time, or long enough.

        Not where the cap leaves no room for one more. A clock that stepped back never leads to an
        older stretch.
        """
        start_s = max(self._stretch_start_s(), self._file.start_s)
        long_enough = self._file.path.stat().st_size >= _FILE_BYTES
        if not (start_s > self._file.start_s or long_enough) or self._room_bytes() < need_bytes:
            return
        connection = self._open()
        truncate_wal(connection)
        create_file(self._directory, start_s, read_state(connection))
        self._close_connection()
        self._open_newest()

    def _stretch_start_s(self) -> int:
        return int(self._clock() // self._bucket_s) * self._bucket_s

    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            raise StoreError("the log has no open file; open it again")
        return self._connection

    def _open_newest(self) -> None:
        """Open the newest file; SQLite brings back every commit that was acknowledged."""
        self._file: LogFile = list_files(self._directory)[-1]
        self._connection = connect(self._file)
        self._next = read_state(self._connection).next

    def _close_connection(self) -> None:
        # Closing may try to move the write-ahead log into the file; what it holds is durable
        # either way, so a disk that refuses here loses nothing.
        if self._connection is not None:
            with contextlib.suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None


def _lock_directory(directory: Path) -> IO[str]:
    directory.mkdir(parents=True, exist_ok=True)
    lock = (directory / "writer.lock").open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise StoreError(
            f"another process writes to the log in {directory}; one serving node owns a log: stop "
            "the other or give this one a state_dir of its own"
        ) from None
    return lock


def _growth_bytes(bytes_: int) -> int:
    """The most that a commit of so many row bytes can add to the directory.

    A record just over half a page leaves the rest of its page empty, hence 2; every page is
    written to the write-ahead log first and lies in both files for a while, hence 2 again.
    """
    return 2 * (2 * bytes_ + _COMMIT_PAGES * PAGE_BYTES)


def _explain(directory: Path, error: Exception) -> StoreError:
    if isinstance(error, StoreError):
        return error
    return StoreError(
        f"the log in {directory} cannot be written ({type(error).__name__}: {error}); nothing was "
        "acknowledged. Check free space and permissions, or move the directory aside where a file "
        "is damaged"
    )
