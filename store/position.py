"""Position: how far a log was read, kept in the catalog beside what was written."""

from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.errors import ConflictError, StoreError
from draftkeep.ingest.log import Log
from draftkeep.store.catalog import Catalog, insert
from draftkeep.store.schema import gaps, offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
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


def locate(catalog: Catalog, log: Log) -> Position:
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
            f"{sorted(known)}: the topic was deleted and made again; forget its stored position "
            "if what it held is not needed"
        )
    stored = known.get(topic)
    if stored is not None and following < stored:
        raise StoreError(
            f"the log ends at offset {following}, below the stored {stored}: it was restored from "
            "an older copy; forget its stored position to read it from the start"
        )
    return Position(identity=identity, stored=stored, first=first, following=following)


def note_gaps(position: Position, read: Sequence[int]) -> tuple[list[tuple[int, int]], int]:
    """The offsets that were due and are gone, as [first, next), and the next offset to expect.

    Raises StoreError when the log answers with an offset below the one asked for.
    """
    found, expected = [], position.expected
    if position.start > expected:
        found.append((expected, position.start))
        expected = position.start
    for offset in read:
        if offset < expected:
            raise StoreError(f"the log gave offset {offset} where {expected} or later was asked")
        if offset > expected:
            found.append((expected, offset))
        expected = offset + 1
    return found, expected


def advance(
    connection: Connection,
    position: Position,
    following: int,
    now_s: float,
    lost: Sequence[tuple[int, int]],
) -> None:
    """Compare and set the stored offset, and record what was lost on the way.

    Raises ConflictError when the offset is not the one this position was read at.
    """
    cluster, topic, partition = position.identity
    key = {"cluster": cluster, "topic": topic, "partition": partition}
    row = offsets.c
    if position.stored is None:
        result = connection.execute(
            insert(connection, offsets)
            .values(**key, next=following, changed_s=now_s)
            .on_conflict_do_nothing()
        )
    else:
        result = connection.execute(
            sa.update(offsets)
            .where(
                row.cluster == cluster,
                row.topic == topic,
                row.partition == partition,
                row.next == position.stored,
            )
            .values(next=following, changed_s=now_s)
        )
    if result.rowcount != 1:
        raise ConflictError(
            f"another compactor moved this log on from offset {position.stored}; start again"
        )
    for first, after in lost:
        connection.execute(sa.insert(gaps).values(**key, first=first, next=after, seen_s=now_s))


def forget_position(catalog: Catalog, cluster: str) -> int:
    """Drop every stored position of a cluster; the operator's answer to a replaced log.

    The next run starts at what the log still holds, and trace ids keep duplicates out. Returns
    how many positions were dropped.
    """
    with catalog.begin() as connection:
        return connection.execute(sa.delete(offsets).where(offsets.c.cluster == cluster)).rowcount
