"""LogOffset: how far a log was read, kept in the catalog beside what was written."""

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.errors import ConflictError, StoreError
from draftkeep.ingest.log import Log
from draftkeep.store.catalog import Catalog, insert
from draftkeep.store.schema import gaps, offsets

_FORGET = "call draftkeep.store.offsets.forget_offsets(catalog, cluster) from Python"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOffset:
    """Where the next read of a log starts.

    `stored` is the catalog's next offset, None for a log it has not met. `first` and `following`
    are the log's own bounds. `start` is where reading goes on.
    """

    identity: tuple[str, str, int]
    stored: int | None
    first: int
    following: int

    @property
    def expected(self) -> int:
        """The offset that comes next if nothing was lost."""
        return self.stored or 0

    @property
    def start(self) -> int:
        """The first offset to read."""
        return max(self.expected, self.first)


def locate(catalog: Catalog, log: Log) -> LogOffset:
    """Where to go on reading this log.

    Raises StoreError when the cluster's partition was read under another topic id, and when the
    log ends below the stored offset: it is then not the log it was, and reading on would lose
    or skip records silently.
    """
    identity = cluster, topic, partition = log.identity()
    row = offsets.c
    with catalog.read() as connection:
        known = {
            item.topic: item.next
            for item in connection.execute(
                sa.select(row.topic, row.next).where(
                    row.cluster == cluster, row.partition == partition
                )
            )
        }
    first, following = log.bounds()
    if known and topic not in known:
        raise StoreError(
            f"the log of cluster {cluster}, partition {partition} has topic id {topic}, expected "
            f"{sorted(known)}: the topic was deleted and made again; if what it held is "
            f"not needed, drop its stored offset: {_FORGET}"
        )
    stored = known.get(topic)
    if stored is not None and following < stored:
        raise StoreError(
            f"the log of cluster {cluster} ends at offset {following}, below the stored {stored}: "
            "it was restored from an older copy; to read it from the start, drop its stored "
            f"offset: {_FORGET}"
        )
    return LogOffset(identity=identity, stored=stored, first=first, following=following)


def note_gaps(offset: LogOffset, read: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
    """The offsets that were due and are gone, as [first, next), and the next offset to expect.

    Raises StoreError when the log answers with an offset below the one asked for.
    """
    found, expected = [], offset.expected
    if offset.start > expected:
        found.append((expected, offset.start))
        expected = offset.start
    for given in read:
        if given < expected:
            raise StoreError(f"the log gave offset {given} where {expected} or later was asked")
        if given > expected:
            found.append((expected, given))
        expected = given + 1
    return found, expected


def advance(
    connection: Connection,
    offset: LogOffset,
    following: int,
    now_s: float,
    lost: Sequence[tuple[int, int]],
) -> None:
    """Compare and set the stored offset, and record what was lost on the way.

    Raises ConflictError when the stored offset is no longer the one in `offset`.
    """
    cluster, topic, partition = offset.identity
    key = {"cluster": cluster, "topic": topic, "partition": partition}
    row = offsets.c
    moved: sa.Executable
    if offset.stored is None:
        moved = (
            insert(connection, offsets)
            .values(**key, next=following, changed_s=now_s)
            .on_conflict_do_nothing()
            .returning(row.next)
        )
    else:
        moved = (
            sa.update(offsets)
            .where(
                row.cluster == cluster,
                row.topic == topic,
                row.partition == partition,
                row.next == offset.stored,
            )
            .values(next=following, changed_s=now_s)
            .returning(row.next)
        )
    if connection.execute(moved).first() is None:
        raise ConflictError(
            f"another compactor moved this log on from offset {offset.stored}; start again"
        )
    for first, after in lost:
        connection.execute(sa.insert(gaps).values(**key, first=first, next=after, seen_s=now_s))


def forget_offsets(catalog: Catalog, cluster: str) -> int:
    """Drop every stored offset of a cluster; the operator's answer to a replaced log.

    The next run starts at what the log still holds, and trace ids keep duplicates out. Returns
    how many were dropped.
    """
    with catalog.begin() as connection:
        return connection.execute(sa.delete(offsets).where(offsets.c.cluster == cluster)).rowcount
