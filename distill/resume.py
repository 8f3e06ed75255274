"""Which stopped job a new call goes on with, and what happens to the others."""

from contextlib import suppress
from pathlib import Path

from draftkeep.distill.workspace import JobPlan, drop, load_plans, only_job
from draftkeep.errors import BusyError, StoreError
from draftkeep.store.catalog import Catalog
from draftkeep.store.jobs import end_job, is_contaminated, is_resumable, running_jobs


def resumable(
    catalog: Catalog, jobs_dir: Path, *, scope: str, base: str, at_s: float
) -> JobPlan | None:
    """The scope's stopped job that can go on, or None.

    The caller holds the lock of jobs, so every other one of the scope has died: it is recorded as
    failed and its directory removed. Those are jobs that learned from erased traces, were made
    under another configuration or from another parent, or stopped before they had a plan.
    StoreError where a directory cannot be removed; then no job of its scope is recorded as failed,
    so that an erasure still finds it.
    """
    chosen: JobPlan | None = None
    for directory, plan in load_plans(jobs_dir):
        if plan is not None and plan.scope != scope:
            continue
        if plan is not None and chosen is None and _goes_on(catalog, plan, base):
            chosen = plan
        else:
            drop(directory)
    for job_id in running_jobs(catalog, scope):
        if chosen is None or job_id != chosen.job_id:
            end_job(
                catalog, job_id, failed=True, drafter=None, record={"status": "dropped"}, at_s=at_s
            )
    return chosen


def drop_contaminated(catalog: Catalog, jobs_dir: Path) -> int:
    """Remove what stopped jobs that learned from erased traces left on disk; returns how many.

    Does nothing while a job runs, which removes its own; call it again later. Makes nothing and
    takes no lock where there is nothing to remove. StoreError where something cannot be removed,
    once all else is; OSError where this user may not look.
    """
    dropped = 0
    left: StoreError | None = None
    if not any(is_contaminated(catalog, path.name) for path, _ in load_plans(jobs_dir)):
        return dropped
    with suppress(BusyError), only_job(jobs_dir):
        for directory, _ in load_plans(jobs_dir):
            if not is_contaminated(catalog, directory.name):
                continue
            try:
                drop(directory)
                dropped += 1
            except StoreError as error:
                left = error
    if left is not None:
        raise left
    return dropped


def _goes_on(catalog: Catalog, plan: JobPlan, base: str) -> bool:
    return plan.base == base and is_resumable(catalog, plan.job_id)
