"""Which stopped job a new call goes on with, and what happens to the others."""

from pathlib import Path

import sqlalchemy as sa

from draftkeep.distill.workspace import JobPlan, drop, load_plans
from draftkeep.store.catalog import Catalog
from draftkeep.store.jobs import end_job
from draftkeep.store.schema import jobs


def resumable(
    catalog: Catalog, jobs_dir: Path, *, scope: str, base: str, at_s: float
) -> JobPlan | None:
    """The scope's stopped job that can go on, or None.

    The caller holds the lock of jobs, so every other one of the scope has died: it is recorded as
    failed and its directory removed. Those are jobs that learned from erased traces, were made
    under another configuration or from another parent, or stopped before they had a plan.
    """
    chosen: JobPlan | None = None
    for directory, plan in load_plans(jobs_dir):
        if plan is not None and plan.scope != scope:
            continue
        if plan is not None and chosen is None and plan.base == base and _runs(catalog, plan):
            chosen = plan
        else:
            drop(directory)
    for job_id in _running(catalog, scope):
        if chosen is None or job_id != chosen.job_id:
            end_job(
                catalog, job_id, failed=True, drafter=None, record={"status": "dropped"}, at_s=at_s
            )
    return chosen


def _running(catalog: Catalog, scope: str) -> list[str]:
    with catalog.read() as connection:
        return list(
            connection.scalars(
                sa.select(jobs.c.id).where(jobs.c.state == "running", jobs.c.scope == scope)
            )
        )


def _runs(catalog: Catalog, plan: JobPlan) -> bool:
    with catalog.read() as connection:
        row = connection.execute(
            sa.select(jobs.c.state, jobs.c.contaminated).where(jobs.c.id == plan.job_id)
        ).one_or_none()
    return row is not None and row.state == "running" and not row.contaminated
