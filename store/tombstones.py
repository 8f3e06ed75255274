"""Tombstones: what must not be read, trained on or stored again."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Row

from draftkeep.ingest.header import Header
from draftkeep.store.catalog import CHUNK
from draftkeep.store.database import utf8
from draftkeep.store.schema import periods, tombstones, trace_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Tombstones:
    """The tombstones that matter to one batch of headers."""

    aliases: frozenset[tuple[bytes, bytes]]
    traces: frozenset[bytes]
    tenants: frozenset[str]

    def cover(self, header: Header) -> bool:
        """Whether the trace under this header was erased."""
        return (
            (header.alias, header.period_id) in self.aliases
            or header.trace_id in self.traces
            or header.tenant in self.tenants
        )


def load_tombstones(connection: Connection, headers: Iterable[Header]) -> Tombstones:
    """Every tombstone that could cover one of `headers`, and perhaps others."""
    wanted: set[bytes] = set()
    for header in headers:
        wanted.update((header.alias, header.trace_id, header.tenant.encode()))
    aliases, traces, tenants = set(), set(), set()
    for row in _rows(connection, sorted(wanted)):
        if row.kind == "alias":
            aliases.add((row.value, row.period_id))
        elif row.kind == "trace":
            traces.add(row.value)
        else:
            tenants.add(row.value.decode())
    return Tombstones(
        aliases=frozenset(aliases), traces=frozenset(traces), tenants=frozenset(tenants)
    )


def _rows(connection: Connection, values: Sequence[bytes]) -> Iterator[Row[Any]]:
    query = sa.select(tombstones)
    # Asking for a value takes several times as long as reading a row, and most often there are few.
    few = len(values) // 4
    every = connection.execute(query.limit(few + 1)).all()
    if len(every) <= few:
        yield from every
        return
    for start in range(0, len(values), CHUNK):
        chunk = values[start : start + CHUNK]
        yield from connection.execute(query.where(tombstones.c.value.in_(chunk)))


def erased_traces() -> sa.ColumnElement[bool]:
    """A condition on `trace_ids`: the row is covered by a tombstone."""
    stone = tombstones.c
    by_alias = sa.exists().where(
        stone.kind == "alias",
        stone.value == trace_ids.c.alias,
        stone.period_id == trace_ids.c.period_id,
    )
    by_trace = sa.exists().where(stone.kind == "trace", stone.value == trace_ids.c.trace_id)
    by_tenant = sa.exists().where(stone.kind == "tenant", stone.value == utf8(trace_ids.c.tenant))
    return sa.or_(by_alias, by_trace, by_tenant)


def erased_shards() -> sa.CompoundSelect[int | None]:
    """The ids of shards with a row that a tombstone covers.

    Asked from the tombstones' side, each kind by its own index: `erased_traces` over all shards
    would look at every trace there is.
    """
    stone, trace = tombstones.c, trace_ids.c
    by_alias = sa.and_(
        stone.kind == "alias", stone.value == trace.alias, stone.period_id == trace.period_id
    )
    by_trace = sa.and_(stone.kind == "trace", stone.value == trace.trace_id)
    # Through the tenant's periods, which traces are indexed by; a trace is stored in one of these.
    # As a list of them: in a join SQLite would begin with the traces.
    erased_periods = sa.select(periods.c.period_id).where(
        stone.kind == "tenant", stone.value == utf8(periods.c.tenant)
    )
    by_tenant = trace.period_id.in_(erased_periods)
    return sa.union(
        *(
            sa.select(trace.shard).where(condition, trace.shard.is_not(None))
            for condition in (by_alias, by_trace, by_tenant)
        )
    )
