"""Jobs in the catalog: who is training on what, so that an erasure can reach a running job."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.errors import ConflictError
from draftkeep.store.catalog import Catalog
from draftkeep.store.database import insert
from draftkeep.store.schema import job_inputs, jobs, tombstones


@dataclass(frozen=True, slots=True, kw_only=True)
class JobInput:
    """Positions a job learns from one alias in one period."""

    tenant: str
    alias: bytes
    period_id: bytes
    positions: int


def start_job(
    catalog: Catalog,
    job_id: str,
    *,
    scope: str,
    parent: bytes | None,
    inputs: Iterable[JobInput],
    at_s: float,
) -> None:
    """Record a running job and what it will read, before it reads.

    Starting the same id again (a resumed job) keeps the inputs known so far and adds the given
    ones. Raises ConflictError when an input is erased or the job is contaminated: the job must
    drop its checkpoint and select again.
    """
    with catalog.begin() as connection:
        connection.execute(
            insert(connection, jobs)
            .values(
                id=job_id,
                scope=scope,
                state="running",
                contaminated=False,
                parent=parent,
                started_s=at_s,
                record={},
            )
            .on_conflict_do_nothing()
        )
        if connection.scalar(sa.select(jobs.c.contaminated).where(jobs.c.id == job_id)):
            raise ConflictError(
                f"job {job_id} learned from erased traces; delete its checkpoint, start a new job"
            )
        for item in inputs:
            _add_input(connection, job_id, item)


def _add_input(connection: Connection, job_id: str, item: JobInput) -> None:
    stone = tombstones.c
    erased = connection.scalar(
        sa.select(sa.func.count()).where(
            stone.value == item.alias, stone.period_id == item.period_id, stone.kind == "alias"
        )
    )
    if erased:
        raise ConflictError(
            f"an input of job {job_id} was erased while it was selected; select again"
        )
    connection.execute(
        insert(connection, job_inputs)
        .values(
            job=job_id,
            alias=item.alias,
            period_id=item.period_id,
            tenant=item.tenant,
            positions=item.positions,
        )
        .on_conflict_do_update(
            index_elements=["job", "alias", "period_id"], set_={"positions": item.positions}
        )
    )


def is_contaminated(catalog: Catalog, job_id: str) -> bool:
    """Whether something this job reads was erased since it started."""
    with catalog.read() as connection:
        return bool(connection.scalar(sa.select(jobs.c.contaminated).where(jobs.c.id == job_id)))


def running_jobs(catalog: Catalog, scope: str) -> list[str]:
    """The ids of a scope's jobs that have not ended, stopped ones included."""
    with catalog.read() as connection:
        return list(
            connection.scalars(
                sa.select(jobs.c.id).where(jobs.c.state == "running", jobs.c.scope == scope)
            )
        )


def is_resumable(catalog: Catalog, job_id: str) -> bool:
    """Whether the job is known, has not ended, and learned from nothing that was erased."""
    with catalog.read() as connection:
        row = connection.execute(
            sa.select(jobs.c.state, jobs.c.contaminated).where(jobs.c.id == job_id)
        ).one_or_none()
    return row is not None and row.state == "running" and not row.contaminated


def end_job(
    catalog: Catalog,
    job_id: str,
    *,
    failed: bool,
    drafter: bytes | None,
    record: Mapping[str, Any],
    at_s: float,
) -> None:
    """Record how a job ended. `record` holds numbers and labels, never content."""
    with catalog.begin() as connection:
        connection.execute(
            sa.update(jobs)
            .where(jobs.c.id == job_id)
            .values(
                state="failed" if failed else "done",
                drafter=drafter,
                record=dict(record),
                ended_s=at_s,
            )
        )
