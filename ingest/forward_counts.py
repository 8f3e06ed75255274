"""ForwardCounts: what a forwarder has done and what it still has to do, for any thread to ask."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

from draftkeep.ingest.log import Log


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardStats:
    """A forwarder at one moment.

    Since start, Kafka acknowledged `sent_records` of `sent_bytes`; `failures` attempts it did not.
    `waiting` records are not acknowledged yet, the oldest of those held up for `oldest_s` (0 where
    none is). `log_bytes` is what the log occupies.
    """

    sent_records: int
    sent_bytes: int
    failures: int
    waiting: int
    oldest_s: float
    log_bytes: int


class ForwardCounts:
    """Counted by the forwarder's thread, read by any. `clock` is the wall clock."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._sent_records = self._sent_bytes = self._failures = 0
        self._acknowledged_to = self._end = self._log_bytes = 0
        self._oldest_s: float | None = None

    def look(self, log: Log) -> None:
        """See how far the log goes and what it occupies. Raises StoreError as the log does."""
        first, end = log.bounds()
        size_bytes = log.size_bytes()
        with self._lock:
            self._acknowledged_to = max(self._acknowledged_to, first)
            self._end, self._log_bytes = end, size_bytes

    def moved(self, records: int, size_bytes: int) -> None:
        """So much was acknowledged."""
        with self._lock:
            self._sent_records += records
            self._sent_bytes += size_bytes

    def reached(self, acknowledged_to: int, oldest_s: float | None) -> None:
        """All below an offset was acknowledged; what is under way is as old as `oldest_s`."""
        with self._lock:
            self._acknowledged_to = max(self._acknowledged_to, acknowledged_to)
            self._oldest_s = oldest_s

    def failed(self) -> None:
        """An attempt went wrong."""
        with self._lock:
            self._failures += 1

    def stats(self) -> ForwardStats:
        """The counts; `waiting` and `log_bytes` as of the last look."""
        with self._lock:
            oldest_s = self._oldest_s
            return ForwardStats(
                sent_records=self._sent_records,
                sent_bytes=self._sent_bytes,
                failures=self._failures,
                waiting=max(0, self._end - self._acknowledged_to),
                oldest_s=0.0 if oldest_s is None else max(0.0, self._clock() - oldest_s),
                log_bytes=self._log_bytes,
            )
