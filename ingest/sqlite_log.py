"""The embedded log: SQLite files in one directory, each of one stretch of time.

Acknowledged means on disk: write-ahead log, `synchronous=FULL`, and an fsync of the directory
for each new file. Expiry is an unlink. It is the newcomer's broker and every node's outbox.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from draftkeep.ingest.group_writer import GroupWriter
from draftkeep.ingest.log_reader import LogReader


class SqliteLog(LogReader):
    """A `Log` with one writing process and any number of reading ones (`open_reader`).

    Offsets, once given out, never return: not after SIGKILL, nor after everything was freed.
    """

    def __init__(
        self,
        directory: Path,
        *,
        cap_bytes: int,
        bucket_s: int,
        clock: Callable[[], float],
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """Open for writing, making the directory and a new topic where there is none.

        `cap_bytes` bounds all files together; an append that could pass it is refused with
        LogFullError. `bucket_s` is the longest stretch of time of one file. `random` names a new
        topic. Raises StoreError where another process writes to the directory.
        """
        self._writer = GroupWriter(
            directory, cap_bytes=cap_bytes, bucket_s=bucket_s, clock=clock, random=random
        )
        super().__init__(directory)

    @staticmethod
    def open_reader(directory: Path) -> LogReader:
        """Open for reading and freeing, beside a writer or without one.

        Raises StoreError where the directory holds no log yet.
        """
        return LogReader(directory)

    def append(self, records: Sequence[bytes]) -> int:
        """Write all records in one durable commit, shared with whoever appends meanwhile."""
        return self._writer.append(records)

    def close(self, timeout_s: float | None = None) -> None:
        """Commit what was accepted and give up the right to write.

        Returns after `timeout_s` at the latest (None waits for ever): where the disk hangs,
        appends that were not acknowledged fail with StoreError, and the right to write goes with
        the process.
        """
        self._writer.close(timeout_s)
