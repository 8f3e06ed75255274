"""Log: the contract between a serving node, which appends, and a compactor, which reads.

A log holds opaque records at offsets that only rise and are never used twice. Where a reader has
got to is the reader's own business: the next offset lives in its catalog, beside what it wrote.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class PartitionId(NamedTuple):
    """What a stored offset belongs to: a topic made again under its name has another id."""

    cluster: str
    topic_id: str
    partition: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """A record as it lies in the log. `appended_s` is the Unix time of its commit."""

    offset: int
    data: bytes
    appended_s: float


class Log(Protocol):
    """One partition of one topic.

    Offsets are strictly increasing, also after a crash and after everything was freed; one that
    was passed over held nothing. Every method may be called from any thread. All failures are
    StoreError.
    """

    @property
    def name(self) -> str:
        """What people call the topic; one that was deleted and made again has the same."""
        ...

    def append(self, records: Sequence[bytes]) -> int:
        """Write the records in order and return the offset of the first.

        They are acknowledged when this returns; each log states what that means (fsync, or
        replicas). A call that raised or never returned may still have written any of them, and
        what is sent again may lie elsewhere, so the reader drops duplicates and expects no
        neighbours. Raises LogFullError, before writing, where a byte cap refuses.
        """
        ...

    def read(self, start: int, limit_records: int, limit_bytes: int) -> list[LogRecord]:
        """The acknowledged records from the first readable offset at or after `start`, in order.

        Stops before either limit is exceeded, but returns at least one record where there is
        one, so that a reader always advances. Empty at the end of the log. Raises StoreError
        where `start` lies beyond the end: that reader's offset is of another log.
        """
        ...

    def free(self, up_to: int) -> None:
        """Give up the records below `up_to`; they can no longer be read.

        Repeating it, or passing an offset that was freed already, changes nothing. Each log
        states whether it outlives a crash, and when the bytes leave the disk. Raises StoreError
        where `up_to` lies beyond the end.
        """
        ...

    def bounds(self) -> tuple[int, int]:
        """The first readable offset and the next one to be given out; equal where it is empty."""
        ...

    def size_bytes(self) -> int:
        """What the log occupies at present, its own bookkeeping included."""
        ...

    def identity(self) -> PartitionId:
        """Which log this is; the same for every reader, and after a restart."""
        ...

    def close(self) -> None:
        """Finish what was accepted and release everything. Harmless when repeated."""
        ...
