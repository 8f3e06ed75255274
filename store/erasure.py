"""Erasure: everything of a subject, in an order that a crash cannot turn round.

First one catalog transaction with the whole plan (tombstones, quarantine, channels, jobs), then
the keys, then a mark that they are gone. From the first step on nothing reads, stores or trains
on the subject's traces; from the second on nobody can. The bytes go when the compactor rewrites.
Killed anywhere, the same call again finishes the job.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.errors import ConflictError
from draftkeep.policies.keyring import Alias, Keyring, SubjectTrail
from draftkeep.policies.names import mac, text
from draftkeep.store.catalog import Catalog
from draftkeep.store.database import insert
from draftkeep.store.influence import (
    clear_channels,
    contaminate_jobs,
    learned_from,
    quarantine,
)
from draftkeep.store.periods import period_ids
from draftkeep.store.schema import dead_letters, erasures, tombstones, trace_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasureResult:
    """What an erasure did, over all its attempts. Counts only; `erasure_id` is 16 bytes.

    `known` is False where no key of the subject exists and none was erased: it was never seen, or
    every period that it was seen in has ended. Then nothing of it can be read, nothing was written
    down, and there is no `erasure_id`. `aliases` are those of living periods and those that
    something learned from. `keys_destroyed` 0 of a known subject means that the key was gone
    before. `traces` counts rows of the catalog: what the log still holds is refused when it
    arrives.
    """

    known: bool
    erasure_id: bytes | None
    aliases: int
    traces: int
    keys_destroyed: int
    drafters_quarantined: int
    channels_moved: int
    jobs_contaminated: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ErasurePlan:
    """What was written down: the erasure, None where there is nobody to erase, and `aliases`."""

    erasure_id: bytes | None
    aliases: tuple[Alias, ...]


_NOTHING = ErasureResult(
    known=False,
    erasure_id=None,
    aliases=0,
    traces=0,
    keys_destroyed=0,
    drafters_quarantined=0,
    channels_moved=0,
    jobs_contaminated=0,
)


def erase_subject(
    catalog: Catalog,
    keyring: Keyring,
    *,
    tenant: str,
    subject: str,
    now_s: float,
    random: Callable[[int], bytes] = os.urandom,
) -> ErasureResult:
    """Erase a named subject of a tenant; safe to repeat, before and after a crash.

    On return no key of the subject exists, every drafter that learned from it (and every
    descendant) is quarantined, and no channel points at one: also where it learned in a period
    that has ended since. Repeating it with nothing new to erase returns the earlier result, and of
    several calls at once each returns the same erasure's. A subject that no key exists of gives a
    result of zeros, and the catalog no row; what learned from it while there was one cannot be
    told any more.
    """
    reference = _subject_ref(keyring, tenant, subject)
    while True:
        plan = plan_erasure(
            catalog,
            tenant=tenant,
            reference=reference,
            look=lambda periods: keyring.trail_of(tenant, subject, periods),
            now_s=now_s,
            fresh_id=random(16),
        )
        # A node may have seen the subject in another period since. Its key goes only once that is
        # planned too: of a crash in between nothing would be left to find it by.
        with suppress(ConflictError):
            destroyed = keyring.destroy_subject(tenant, subject, planned=plan.aliases)
            break
    if plan.erasure_id is None:
        return _NOTHING
    return finish_erasure(catalog, plan.erasure_id, keys_destroyed=destroyed, now_s=now_s)


def _subject_ref(keyring: Keyring, tenant: str, subject: str) -> bytes:
    """What stands for the subject in the catalog; only a holder of the lookup key can make it."""
    return mac(keyring.lookup_key(tenant), b"draftkeep/v1/erasure" + text(subject))[:16]


def plan_erasure(
    catalog: Catalog,
    *,
    tenant: str,
    reference: bytes,
    look: Callable[[Sequence[bytes]], SubjectTrail | None],
    now_s: float,
    fresh_id: bytes,
) -> ErasurePlan:
    """The first step: write down what is to go, in one transaction.

    `reference` stands for the subject. `look` is asked, inside the transaction and about all the
    tenant's periods, what the subject is called; None says that no key of it exists. An unfinished
    erasure of the subject goes on. Where there is none, one begins with `fresh_id`; without a key
    the last one stands, and where there never was one nothing is written.
    """
    with catalog.begin() as connection:
        # Not before: another erasure may have come to its end while this one waited to write.
        trail = look(period_ids(connection, tenant))
        erasure_id = _find(connection, tenant, reference, reuse_done=trail is None)
        if erasure_id is None:
            if trail is None:
                return ErasurePlan(erasure_id=None, aliases=())
            erasure_id = fresh_id
            _begin(connection, erasure_id, tenant, reference, now_s)
        aliases: set[Alias] = set()
        if trail is not None:
            aliases = {*trail.used, *learned_from(connection, trail.others)}
        for period_id, alias in sorted(aliases):
            connection.execute(
                insert(connection, tombstones)
                .values(
                    kind="alias",
                    value=alias,
                    period_id=period_id,
                    tenant=tenant,
                    erasure=erasure_id,
                    at_s=now_s,
                )
                .on_conflict_do_nothing()
            )
            connection.execute(sa.delete(dead_letters).where(dead_letters.c.alias == alias))
        carry_out(connection, erasure_id, now_s)
    return ErasurePlan(erasure_id=erasure_id, aliases=tuple(aliases))


def _find(
    connection: Connection, tenant: str, reference: bytes, *, reuse_done: bool
) -> bytes | None:
    """The erasure to go on with: an unfinished one, else the last where nothing is new."""
    row = erasures.c
    for state in ("planned", "done") if reuse_done else ("planned",):
        found: bytes | None = connection.scalar(
            sa.select(row.id)
            .where(row.tenant == tenant, row.subject_ref == reference, row.state == state)
            .order_by(row.planned_s.desc())
            .limit(1)
        )
        if found is not None:
            return found
    return None


def _begin(
    connection: Connection, erasure_id: bytes, tenant: str, reference: bytes, now_s: float
) -> None:
    connection.execute(
        sa.insert(erasures).values(
            id=erasure_id,
            tenant=tenant,
            subject_ref=reference,
            state="planned",
            planned_s=now_s,
            aliases=0,
            traces=0,
            keys_destroyed=0,
            drafters_quarantined=0,
            channels_moved=0,
            jobs_contaminated=0,
        )
    )


def carry_out(connection: Connection, erasure_id: bytes, now_s: float) -> None:
    """Quarantine, move channels and mark jobs by the erasure's tombstones; count all of it.

    Safe to repeat: it finds what the tombstones cover by then.
    """
    drafters, newly = quarantine(connection, erasure_id)
    moved = clear_channels(connection, drafters, now_s)
    jobs = contaminate_jobs(connection, erasure_id, drafters)
    stone, trace, row = tombstones.c, trace_ids.c, erasures.c
    aliases = sa.select(sa.func.count()).where(stone.erasure == erasure_id).scalar_subquery()
    covered = sa.select(sa.func.count()).where(
        stone.erasure == erasure_id,
        stone.kind == "alias",
        stone.value == trace.alias,
        stone.period_id == trace.period_id,
    )
    traces = connection.scalar(covered) or 0
    connection.execute(
        sa.update(erasures)
        .where(row.id == erasure_id)
        .values(
            aliases=aliases,
            # Those that have expired since are in no count any more, and were erased all the same.
            traces=sa.case((row.traces < traces, traces), else_=row.traces),
            drafters_quarantined=row.drafters_quarantined + newly,
            channels_moved=row.channels_moved + moved,
            jobs_contaminated=row.jobs_contaminated + jobs,
        )
    )


def finish_erasure(
    catalog: Catalog, erasure_id: bytes, *, keys_destroyed: int, now_s: float
) -> ErasureResult:
    """The last step, once no key is left: mark the erasure done. Safe to repeat."""
    row = erasures.c
    with catalog.begin() as connection:
        connection.execute(
            sa.update(erasures)
            .where(row.id == erasure_id)
            .values(
                state="done",
                keys_destroyed=row.keys_destroyed + keys_destroyed,
                keys_destroyed_s=sa.func.coalesce(row.keys_destroyed_s, now_s),
            )
        )
        found = connection.execute(sa.select(erasures).where(row.id == erasure_id)).one()
    return ErasureResult(
        known=True,
        erasure_id=erasure_id,
        aliases=found.aliases,
        traces=found.traces,
        keys_destroyed=found.keys_destroyed,
        drafters_quarantined=found.drafters_quarantined,
        channels_moved=found.channels_moved,
        jobs_contaminated=found.jobs_contaminated,
    )
