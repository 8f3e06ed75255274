"""LogOffset: how far a log was read, kept in the catalog beside what was written."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.errors import ConflictError, LogReplacedError, StoreError
from draftkeep.ingest.kafka_topic_state import TopicState
from draftkeep.ingest.log import Log, PartitionId
from draftkeep.store.catalog import Catalog
from draftkeep.store.database import insert
from draftkeep.store.schema import gaps, offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOffset:
    """Where the next read of a log starts.

    `topic_name` is empty where nobody knows it. `stored` is the catalog's next offset,
    None for a log it has not met. `first` and `following` are the log's own bounds. `start` is
    where reading goes on.
    """

    identity: PartitionId
    stored: int | None
    first: int
    following: int
    topic_name: str = ""

    @property
    def expected(self) -> int:
        """The offset that comes next if nothing was lost; of a log not met, where it begins."""
        return self.first if self.stored is None else self.stored

    @property
    def start(self) -> int:
        """The first offset to read."""
        return max(self.expected, self.first)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredOffset:
    """How far one partition of a topic was read, as the catalog has it."""

    topic_name: str
    cluster: str
    topic_id: str
    partition: int
    next: int


def locate(catalog: Catalog, log: Log) -> LogOffset:
    """Where to go on reading this log.

    Raises LogReplacedError when a topic of this name was read under another id, and when the log
    ends below the stored offset: it is then not the log it was, and reading on would lose or skip
    records silently.
    """
    identity = cluster, topic_id, partition = log.identity()
    row = offsets.c
    same = sa.or_(row.topic == topic_id, row.name.in_((log.name, "")))
    query = sa.select(row.topic, row.partition, row.next).where(row.cluster == cluster, same)
    with catalog.read() as connection:
        known = {(found.topic, found.partition): found.next for found in connection.execute(query)}
    first, following = log.bounds()
    others = {found for found, _ in known} - {topic_id}
    if others:
        raise LogReplacedError(
            f"topic {log.name} has id {topic_id}, expected {', '.join(sorted(others))}, under "
            "which it was read before: it was deleted and made again, and what was not compacted "
            f"by then is lost. To read the one that is there from its start: {_remedy(*others)}"
        )
    stored = known.get((topic_id, partition))
    if stored is not None and following < stored:
        raise LogReplacedError(
            f"partition {partition} of {log.name} ends at offset {following}, below the stored "
            f"{stored}: it was restored from an older copy, or brokers lost records that they had "
            "acknowledged. To read it from its start, where traces that are stored already are "
            f"recognised: {_remedy(topic_id)}"
        )
    return LogOffset(
        identity=identity, stored=stored, first=first, following=following, topic_name=log.name
    )


def _remedy(*topic_ids: str) -> str:
    # By id: another log may have the same name, and a row of an earlier version has none.
    commands = (f"draftkeep catalog forget-log {topic_id}" for topic_id in sorted(topic_ids))
    return ", and ".join(commands)


def note_gaps(
    offset: LogOffset, read: Sequence[int], log: Log
) -> tuple[list[tuple[int, int]], int]:
    """The offsets that were due and are gone, as [first, next), and the next offset to expect.

    `read` are the offsets that `log` gave from `offset.start` on. What it passed over is gone
    where it lies below the log's beginning, and held no record elsewhere. Raises StoreError when
    the log answers with an offset below the one asked for.
    """
    passed, expected = [], offset.expected
    if offset.start > expected:
        passed.append((expected, offset.start))
        expected = offset.start
    for given in read:
        if given < expected:
            raise StoreError(f"the log gave offset {given} where {expected} or later was asked")
        if given > expected:
            passed.append((expected, given))
        expected = given + 1
    # Asked once more, since a log may lose its oldest records while they are read.
    first = max(offset.first, log.bounds()[0]) if passed else offset.first
    return [(begin, min(end, first)) for begin, end in passed if begin < first], expected


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
    key = _key(offset.identity)
    row = offsets.c
    moved: sa.Executable
    if offset.stored is None:
        moved = (
            insert(connection, offsets)
            .values(**key, next=following, changed_s=now_s, name=offset.topic_name)
            .on_conflict_do_nothing()
            .returning(row.next)
        )
    else:
        moved = (
            sa.update(offsets)
            .where(*(row[name] == value for name, value in key.items()), row.next == offset.stored)
            .values(next=following, changed_s=now_s, name=offset.topic_name)
            .returning(row.next)
        )
    if connection.execute(moved).first() is None:
        raise ConflictError(
            f"another compactor moved this log on from offset {offset.stored}; start again"
        )
    add_gaps(connection, offset.identity, lost, now_s)


def add_gaps(
    connection: Connection, identity: PartitionId, lost: Iterable[tuple[int, int]], now_s: float
) -> None:
    """Record offsets that nobody will read any more, each as [first, next)."""
    key = _key(identity)
    for first, after in lost:
        connection.execute(sa.insert(gaps).values(**key, first=first, next=after, seen_s=now_s))


def stored_offsets(catalog: Catalog, name_or_id: str) -> list[StoredOffset]:
    """What is stored of the topic of this name or id, in order; empty where it was never read."""
    row = offsets.c
    query = sa.select(offsets).where(_called(name_or_id))
    with catalog.read() as connection:
        return [
            StoredOffset(
                topic_name=found.name,
                cluster=found.cluster,
                topic_id=found.topic,
                partition=found.partition,
                next=found.next,
            )
            for found in connection.execute(query.order_by(row.cluster, row.topic, row.partition))
        ]


def committed_offsets(catalog: Catalog, state: TopicState) -> dict[int, int]:
    """How far each partition of exactly this topic was read."""
    return {
        row.partition: row.next
        for row in stored_offsets(catalog, state.topic_id)
        if row.cluster == state.cluster
    }


def forget_log(catalog: Catalog, name_or_id: str) -> int:
    """Drop the stored offsets of a topic, and nothing else: what to do about a replaced one.

    The next run starts at what the log still holds, and trace ids keep duplicates out. Returns
    how many were dropped.
    """
    with catalog.begin() as connection:
        return connection.execute(sa.delete(offsets).where(_called(name_or_id))).rowcount


def _called(name_or_id: str) -> sa.ColumnElement[bool]:
    return sa.or_(offsets.c.name == name_or_id, offsets.c.topic == name_or_id)


def _key(identity: PartitionId) -> dict[str, str | int]:
    """A partition, as the columns of the tables have it."""
    cluster, topic_id, partition = identity
    return {"cluster": cluster, "topic": topic_id, "partition": partition}
