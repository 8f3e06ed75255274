"""Influence: what learned from erased traces, and taking it out of service."""

from collections.abc import Collection, Sequence

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.policies.keyring import Alias
from draftkeep.store.ancestry import clean_ancestor
from draftkeep.store.catalog import CHUNK
from draftkeep.store.schema import channels, drafters, job_inputs, jobs, lineage, tombstones


def learned_from(connection: Connection, aliases: Sequence[Alias]) -> set[Alias]:
    """Those (period id, alias) that a drafter learned from, or that a job was to read."""
    found: set[Alias] = set()
    for start in range(0, len(aliases), CHUNK):
        values = [alias for _, alias in aliases[start : start + CHUNK]]
        for row in (lineage.c, job_inputs.c):
            query = sa.select(row.period_id, row.alias).where(row.alias.in_(values)).distinct()
            found.update((period_id, alias) for period_id, alias in connection.execute(query))
    return found & set(aliases)


def quarantine(connection: Connection, erasure_id: bytes) -> tuple[set[bytes], int]:
    """Quarantine every drafter that learned from the erasure's aliases, and every descendant.

    Returns all of them, and how many were not quarantined before.
    """
    stone = tombstones.c
    learned = sa.select(lineage.c.drafter).where(
        stone.erasure == erasure_id,
        stone.value == lineage.c.alias,
        stone.period_id == lineage.c.period_id,
    )
    return quarantine_with_descendants(connection, set(connection.scalars(learned)))


def quarantine_with_descendants(
    connection: Connection, found: set[bytes]
) -> tuple[set[bytes], int]:
    """Quarantine these drafters and all that descend from them; returns as `quarantine` does."""
    frontier = found
    while frontier:
        children = sa.select(drafters.c.digest).where(drafters.c.parent.in_(frontier))
        frontier = set(connection.scalars(children)) - found
        found = found | frontier
    newly = connection.execute(
        sa.update(drafters)
        .where(drafters.c.digest.in_(found), drafters.c.status != "quarantined")
        .values(status="quarantined")
    ).rowcount
    return found, newly


def clear_channels(connection: Connection, tainted: Collection[bytes], now_s: float) -> int:
    """Move channels off `tainted` drafters to their newest clean ancestor, or to nothing."""
    pointing = connection.execute(sa.select(channels).where(channels.c.digest.in_(tainted))).all()
    for row in pointing:
        connection.execute(
            sa.update(channels)
            .where(channels.c.scope == row.scope, channels.c.name == row.name)
            .values(digest=clean_ancestor(connection, row.digest), changed_s=now_s)
        )
    return len(pointing)


def contaminate_jobs(connection: Connection, erasure_id: bytes, tainted: Collection[bytes]) -> int:
    """Mark the unfinished jobs that read the erasure's aliases or start from a tainted drafter.

    Failed ones too, since a failed job may be resumed from its checkpoint. Returns how many were
    not marked before.
    """
    stone = tombstones.c
    reading = sa.select(job_inputs.c.job).where(
        stone.erasure == erasure_id,
        stone.value == job_inputs.c.alias,
        stone.period_id == job_inputs.c.period_id,
    )
    return connection.execute(
        sa.update(jobs)
        .where(
            jobs.c.state != "done",
            jobs.c.contaminated.is_(False),
            sa.or_(jobs.c.id.in_(reading), jobs.c.parent.in_(tainted)),
        )
        .values(contaminated=True)
    ).rowcount
