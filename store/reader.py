"""Reading sealed traces for a job: live, not erased, each once."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from draftkeep.errors import StoreError
from draftkeep.ingest.header import Header
from draftkeep.ingest.record import SealedTrace
from draftkeep.policies.retention import effective_deadline
from draftkeep.store.catalog import Catalog
from draftkeep.store.periods import load_periods
from draftkeep.store.schema import shards, trace_ids
from draftkeep.store.shard import read_shard
from draftkeep.store.shard_rows import ShardRow, list_shards
from draftkeep.store.storage import Storage
from draftkeep.store.tombstones import erased_traces

_Key = tuple[bytes, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Facts:
    """Deadlines by period, and the keys that a tombstone covers, for one shard."""

    deadlines: Mapping[bytes, int]
    erased: frozenset[_Key]


def iter_sealed(
    catalog: Catalog,
    storage: Storage,
    *,
    tenants: Collection[str] | None,
    target: bytes | None,
    not_after_s: float,
    include_erased: bool = False,
) -> Iterator[SealedTrace]:
    """Sealed traces, each once, those that live longest first.

    `tenants` None means every tenant, `target` None every target model. Left out are traces
    whose deadline (the earlier of header and period record) is not after `not_after_s`, which a
    caller sets to its clock, and traces with a tombstone, asked again at every shard;
    `include_erased` gives those too, for showing that they no longer open. A shard that was
    replaced since it was listed is looked up again, so a merge or a rewrite meanwhile neither
    loses nor repeats a trace. Raises StoreError when the catalog keeps listing a shard whose file
    is not there.
    """
    finished: set[int] = set()
    given: set[_Key] = set()
    lost: set[int] = set()
    replaced = True
    while replaced:
        replaced = False
        for shard in _pending(catalog, target, not_after_s, finished):
            if shard.id in lost:
                raise StoreError(
                    f"shard {shard.name} is listed but its file is not there; restore it, "
                    "or delete its row"
                )
            facts = _facts(catalog, shard, include_erased)
            try:
                if facts is not None:
                    keep = _keeper(facts, int(not_after_s), given)
                    yield from read_shard(storage, shard.name, tenants=tenants, keep=keep)
                    finished.add(shard.id)
                    continue
            except FileNotFoundError:
                lost.add(shard.id)
            replaced = True
            break


def count_left_out(catalog: Catalog, *, tenant: str, target: bytes, now_s: float) -> dict[str, int]:
    """How many of the tenant's stored traces `iter_sealed` leaves out for a target, by reason."""
    rows = trace_ids.join(shards, trace_ids.c.shard == shards.c.id)
    stored = sa.select(sa.func.count()).select_from(rows).where(trace_ids.c.tenant == tenant)
    live = shards.c.bucket_s > int(now_s)
    conditions = {
        "expired": ~live,
        "erased": live & erased_traces(),
        "wrong_target": live & ~erased_traces() & (shards.c.target != target),
    }
    with catalog.read() as connection:
        counts = {
            reason: int(connection.scalar(stored.where(condition)) or 0)
            for reason, condition in conditions.items()
        }
    return {reason: count for reason, count in counts.items() if count}


def _pending(
    catalog: Catalog, target: bytes | None, not_after_s: float, finished: set[int]
) -> list[ShardRow]:
    conditions = [shards.c.bucket_s > int(not_after_s)]
    if target is not None:
        conditions.append(shards.c.target == target)
    with catalog.read() as connection:
        listed = list_shards(connection, *conditions)
    return [shard for shard in listed if shard.id not in finished]


def _keeper(facts: _Facts, not_after_s: int, given: set[_Key]) -> Callable[[Header], bool]:
    def keep(header: Header) -> bool:
        key = (header.trace_id, header.node)
        destroy_at_s = facts.deadlines.get(header.period_id, 0)
        if key in facts.erased or key in given:
            return False
        if effective_deadline(header.expiry_s, destroy_at_s) <= not_after_s:
            return False
        given.add(key)
        return True

    return keep


def _facts(catalog: Catalog, shard: ShardRow, include_erased: bool) -> _Facts | None:
    """What the catalog says of a shard's rows; None when the shard is no longer listed."""
    row = trace_ids.c
    with catalog.read() as connection:
        if not list_shards(connection, shards.c.id == shard.id):
            return None
        used = connection.scalars(sa.select(row.period_id).where(row.shard == shard.id).distinct())
        periods = load_periods(connection, set(used))
        query = sa.select(row.trace_id, row.node).where(row.shard == shard.id, erased_traces())
        erased = [] if include_erased else connection.execute(query).all()
    return _Facts(
        deadlines={key: period.record.destroy_at_s for key, period in periods.items()},
        erased=frozenset((found.trace_id, found.node) for found in erased),
    )
