"""Rows of `log_deletions`: what is owed, read at once and written by compare-and-set."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.ingest.kafka_topic_state import TopicState
from draftkeep.ingest.log import PartitionId
from draftkeep.store.catalog import CHUNK, Catalog
from draftkeep.store.log_deletion_step import Deletion
from draftkeep.store.schema import erasures, log_deletions, offsets

_UNMARKED = sa.and_(erasures.c.state == "done", erasures.c.log_request.is_(None))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What the catalog knew at one moment.

    `unmarked` are erasures that are done and that no request covers. `owed` is not settled.
    `late` is where erased traces arrived at or above every mark. `committed` is the first offset
    of each partition that is not in a shard.
    """

    unmarked: tuple[bytes, ...]
    owed: tuple[Deletion, ...]
    late: Mapping[PartitionId, int]
    committed: Mapping[PartitionId, int]


def read_ledger(catalog: Catalog, topic_name: str) -> Ledger:
    """One snapshot; `late` is of the topic with this name alone."""
    with catalog.read() as connection:
        return Ledger(
            unmarked=tuple(connection.scalars(sa.select(erasures.c.id).where(_UNMARKED))),
            owed=tuple(_owed(connection)),
            late=_late(connection, topic_name),
            committed={
                PartitionId(row.cluster, row.topic, row.partition): row.next
                for row in connection.execute(sa.select(offsets))
            },
        )


def note_erased(connection: Connection, identity: PartitionId, up_to: int) -> None:
    """Something erased arrived below `up_to`: call it in the transaction that reads past it.

    It was in a node's hands while its subject was erased, so the mark may lie before it.
    """
    connection.execute(sa.update(offsets).where(*_of(offsets, identity)).values(erased_to=up_to))


def record_request(
    catalog: Catalog,
    state: TopicState,
    unmarked: Sequence[bytes],
    marks: Mapping[int, int],
    now_s: float,
) -> tuple[int, list[Deletion]]:
    """One request for these erasures, or for what came late, and its deletions.

    Returns how many erasures it covers. Does nothing where another process was first.
    """
    with catalog.begin() as connection:
        request = _next_request(connection)
        covered = _cover(connection, unmarked, request)
        if not covered:
            late = _late(connection, state.topic_name)
            marks = {
                number: mark
                for number, mark in marks.items()
                if late.get(state.partition_id(number)) == mark
            }
        made = [
            Deletion(
                request=request,
                topic_name=state.topic_name,
                partition_id=state.partition_id(number),
                up_to=up_to,
            )
            for number, up_to in sorted(marks.items())
            if up_to > 0
        ]
        for item in made:
            cluster, topic_id, partition = item.partition_id
            connection.execute(
                sa.insert(log_deletions).values(
                    request=item.request,
                    cluster=cluster,
                    topic=topic_id,
                    partition=partition,
                    name=item.topic_name,
                    up_to=item.up_to,
                    attempts=item.attempts,
                    requested_s=now_s,
                )
            )
    return covered, made


def record_steps(
    catalog: Catalog, before: Iterable[Deletion], after: Iterable[Deletion], now_s: float
) -> set[PartitionId]:
    """Write what a look came to; returns the partitions that another process changed meanwhile.

    Nothing of those is written, and nothing in them may be deleted by this look: the other's may
    be the newer one, and would not learn that records had come back.
    """
    old = {(item.request, item.partition_id): item for item in before}
    new = {(item.request, item.partition_id): item for item in after}
    if all(old[key] == item for key, item in new.items()):
        return set()
    with catalog.begin() as connection:
        current = {(item.request, item.partition_id): item for item in _owed(connection)}
        lost = {key[1] for key in new if current.get(key) != old[key]}
        for key, item in new.items():
            if item != old[key] and item.partition_id not in lost:
                _write(connection, item, now_s)
    return lost


def _next_request(connection: Connection) -> int:
    made = connection.scalar(sa.select(sa.func.max(log_deletions.c.request)))
    # One whose partitions were all empty left no row.
    given = connection.scalar(sa.select(sa.func.max(erasures.c.log_request)))
    return 1 + max(made or 0, given or 0)


def _cover(connection: Connection, unmarked: Sequence[bytes], request: int) -> int:
    covered = 0
    for start in range(0, len(unmarked), CHUNK):
        chunk = erasures.c.id.in_(unmarked[start : start + CHUNK])
        changed = sa.update(erasures).where(_UNMARKED, chunk).values(log_request=request)
        covered += connection.execute(changed).rowcount
    return covered


def _owed(connection: Connection) -> Iterable[Deletion]:
    row = log_deletions.c
    query = sa.select(log_deletions).where(row.settled_s.is_(None))
    order = (row.request, row.cluster, row.topic, row.partition)
    for found in connection.execute(query.order_by(*order)):
        yield Deletion(
            request=found.request,
            topic_name=found.name,
            partition_id=PartitionId(found.cluster, found.topic, found.partition),
            up_to=found.up_to,
            deleted_s=found.deleted_s,
            attempts=found.attempts,
        )


def _late(connection: Connection, topic_name: str) -> dict[PartitionId, int]:
    row, read = log_deletions.c, offsets.c
    marked = (
        sa.select(sa.func.coalesce(sa.func.max(row.up_to), 0))
        .where(
            row.cluster == read.cluster, row.topic == read.topic, row.partition == read.partition
        )
        .scalar_subquery()
    )
    query = sa.select(read.cluster, read.topic, read.partition, read.erased_to)
    found = connection.execute(query.where(read.name == topic_name, read.erased_to > marked))
    return {PartitionId(item.cluster, item.topic, item.partition): item.erased_to for item in found}


def _write(connection: Connection, item: Deletion, now_s: float) -> None:
    this = (log_deletions.c.request == item.request, *_of(log_deletions, item.partition_id))
    connection.execute(
        sa.update(log_deletions)
        .where(*this)
        .values(
            deleted_s=item.deleted_s,
            attempts=item.attempts,
            outcome=None if item.outcome is None else str(item.outcome),
            settled_s=None if item.outcome is None else now_s,
        )
    )


def _of(table: sa.Table, identity: PartitionId) -> tuple[sa.ColumnElement[bool], ...]:
    """The rows of this partition."""
    cluster, topic_id, partition = identity
    row = table.c
    return row.cluster == cluster, row.topic == topic_id, row.partition == partition
