"""What must hold inside the catalog, as queries for the rows that break it.

Each rule's query gives one column that names what is broken: a shard, an id. Never content.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.store.periods import past_periods
from draftkeep.store.schema import (
    channels,
    dead_letters,
    drafters,
    erasures,
    gaps,
    job_inputs,
    jobs,
    lineage,
    offsets,
    periods,
    shards,
    tombstones,
    trace_ids,
)
from draftkeep.store.tombstones import erased_shards


class Repair(StrEnum):
    """What mends a broken rule without a loss: nothing, or one of the store's own chores."""

    NONE = "none"
    SWEEP = "sweep"
    REWRITE = "rewrite"
    ERASURE = "erasure"


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleResult:
    """One rule, and how much breaks it: 0 where it holds. `examples` are a few names or ids."""

    rule: str
    broken: int
    examples: tuple[str, ...]
    remedy: str
    repair: Repair


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """`broken(now_s)` gives the rows that break it; `remedy` is what to do about them."""

    name: str
    broken: Callable[[int], sa.Select[tuple[object]]]
    remedy: str
    repair: Repair = Repair.NONE


_EXAMPLES = 3
_COMPACT = "run draftkeep compact, or repair"
_RESTORE = "restore catalog and shards from one backup"


def _miscounted(now_s: int) -> sa.Select[tuple[object]]:
    stored = (
        sa.select(trace_ids.c.shard, sa.func.count().label("traces"))
        .group_by(trace_ids.c.shard)
        .subquery()
    )
    joined = shards.outerjoin(stored, stored.c.shard == shards.c.id)
    traces = sa.func.coalesce(stored.c.traces, 0)
    # The trace ids of a shard past its deadline go first, and it after them.
    differs = sa.and_(shards.c.bucket_s > now_s, shards.c.rows != traces)
    return sa.select(shards.c.name).select_from(joined).where(differs)


def _misplaced(_: int) -> sa.Select[tuple[object]]:
    joined = trace_ids.join(shards, trace_ids.c.shard == shards.c.id)
    differs = trace_ids.c.bucket_s != shards.c.bucket_s
    return sa.select(shards.c.name).select_from(joined).where(differs).distinct()


def _homeless(_: int) -> sa.Select[tuple[object]]:
    listed = sa.exists().where(shards.c.id == trace_ids.c.shard)
    return sa.select(trace_ids.c.trace_id).where(trace_ids.c.shard.is_not(None), ~listed)


def _unpublished(_: int) -> sa.Select[tuple[object]]:
    published = sa.exists().where(periods.c.period_id == trace_ids.c.period_id)
    stored = trace_ids.c.shard.is_not(None)
    return sa.select(trace_ids.c.period_id).where(stored, ~published).distinct()


def _erased(now_s: int) -> sa.Select[tuple[object]]:
    living = shards.c.bucket_s > now_s
    return sa.select(shards.c.name).where(living, shards.c.id.in_(erased_shards()))


def _past_period(now_s: int) -> sa.Select[tuple[object]]:
    past = trace_ids.c.period_id.in_(past_periods(now_s))
    holding = sa.select(trace_ids.c.shard).where(past)
    living = shards.c.bucket_s > now_s
    return sa.select(shards.c.name).where(living, shards.c.id.in_(holding))


def _past_shards(now_s: int) -> sa.Select[tuple[object]]:
    return sa.select(shards.c.name).where(shards.c.bucket_s <= now_s)


def _past_ids(now_s: int) -> sa.Select[tuple[object]]:
    return sa.select(trace_ids.c.bucket_s).where(trace_ids.c.bucket_s <= now_s).distinct()


def _past_letters(now_s: int) -> sa.Select[tuple[object]]:
    return sa.select(dead_letters.c.sha256).where(dead_letters.c.expiry_s <= now_s)


def _unfinished(_: int) -> sa.Select[tuple[object]]:
    return sa.select(erasures.c.id).where(erasures.c.state != "done")


def _tainted_drafters(_: int) -> sa.Select[tuple[object]]:
    stone = tombstones.c
    learned = sa.exists().where(
        lineage.c.drafter == drafters.c.digest,
        stone.kind == "alias",
        stone.value == lineage.c.alias,
        stone.period_id == lineage.c.period_id,
    )
    return sa.select(drafters.c.digest).where(drafters.c.status != "quarantined", learned)


def _tainted_children(_: int) -> sa.Select[tuple[object]]:
    parent = drafters.alias("parent")
    return sa.select(drafters.c.digest).where(
        drafters.c.status != "quarantined",
        drafters.c.parent == parent.c.digest,
        parent.c.status == "quarantined",
    )


def _tainted_channels(_: int) -> sa.Select[tuple[object]]:
    served = sa.select(drafters.c.digest).where(drafters.c.status == "quarantined")
    label = channels.c.scope + "/" + channels.c.name
    return sa.select(label).where(channels.c.digest.in_(served))


def _tainted_jobs(_: int) -> sa.Select[tuple[object]]:
    stone = tombstones.c
    reading = sa.exists().where(
        job_inputs.c.job == jobs.c.id,
        stone.kind == "alias",
        stone.value == job_inputs.c.alias,
        stone.period_id == job_inputs.c.period_id,
    )
    return sa.select(jobs.c.id).where(jobs.c.state != "done", ~jobs.c.contaminated, reading)


def _gap_beyond(_: int) -> sa.Select[tuple[object]]:
    offset, gap = offsets.c, gaps.c
    same = sa.and_(
        gap.cluster == offset.cluster,
        gap.topic == offset.topic,
        gap.partition == offset.partition,
    )
    return sa.select(gap.cluster).where(same, gap.next > offset.next).distinct()


RULES = (
    Rule(
        name="a shard has as many trace ids as rows",
        broken=_miscounted,
        remedy=_RESTORE,
    ),
    Rule(name="a trace and its shard expire together", broken=_misplaced, remedy=_RESTORE),
    Rule(name="a stored trace's shard is listed", broken=_homeless, remedy=_RESTORE),
    Rule(
        name="a stored trace's period is published",
        broken=_unpublished,
        remedy="start the node that sealed it: it publishes its periods; until then it is not read",
    ),
    Rule(name="no gap lies beyond its offset", broken=_gap_beyond, remedy=_RESTORE),
    Rule(
        name="no shard is past its deadline",
        broken=_past_shards,
        remedy=_COMPACT,
        repair=Repair.SWEEP,
    ),
    Rule(
        name="no trace id is past its deadline",
        broken=_past_ids,
        remedy=_COMPACT,
        repair=Repair.SWEEP,
    ),
    Rule(
        name="no dead letter is past its deadline",
        broken=_past_letters,
        remedy=_COMPACT,
        repair=Repair.SWEEP,
    ),
    Rule(
        name="no shard holds rows past a shortened deadline",
        broken=_past_period,
        remedy=_COMPACT,
        repair=Repair.REWRITE,
    ),
    Rule(
        name="no shard holds erased rows",
        broken=_erased,
        remedy=_COMPACT,
        repair=Repair.REWRITE,
    ),
    Rule(
        name="every erasure is finished",
        broken=_unfinished,
        remedy="erase the subject again: its keys may still exist",
    ),
    Rule(
        name="what learned from erased traces is quarantined",
        broken=_tainted_drafters,
        remedy="repair, then train again",
        repair=Repair.ERASURE,
    ),
    Rule(
        name="what descends from a quarantined drafter is quarantined",
        broken=_tainted_children,
        remedy="repair, then train again",
        repair=Repair.ERASURE,
    ),
    Rule(
        name="no channel points at a quarantined drafter",
        broken=_tainted_channels,
        remedy="repair moves it to a clean ancestor, or clears it",
        repair=Repair.ERASURE,
    ),
    Rule(
        name="no unfinished job reads erased traces",
        broken=_tainted_jobs,
        remedy="repair marks it; its checkpoint is then dropped",
        repair=Repair.ERASURE,
    ),
)


def check_rules(connection: Connection, now_s: float) -> Iterator[RuleResult]:
    """Ask every rule in the caller's snapshot."""
    for rule in RULES:
        broken = rule.broken(int(now_s))
        few = list(connection.scalars(broken.limit(_EXAMPLES)))
        total = sa.select(sa.func.count()).select_from(broken.subquery())
        yield RuleResult(
            rule=rule.name,
            broken=connection.scalar(total) or 0 if few else 0,
            examples=examples(few),
            remedy=rule.remedy,
            repair=rule.repair,
        )


def examples(values: Sequence[object]) -> tuple[str, ...]:
    """The first few of what is broken, bytes as hexadecimal."""
    return tuple(
        value.hex() if isinstance(value, bytes) else str(value) for value in values[:_EXAMPLES]
    )
