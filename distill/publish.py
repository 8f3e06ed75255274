"""From a judged drafter to one that serves: save, register, sign, move the channel."""

import math
import shutil
from dataclasses import replace

from draftkeep.distill.result import JobResult, JobStatus
from draftkeep.distill.start import Start
from draftkeep.distill.workbench import Workbench
from draftkeep.distill.workspace import JobPlan
from draftkeep.errors import ConflictError, DeniedError
from draftkeep.store.models.drafter import Drafter, save_drafter


def publish(
    bench: Workbench, result: JobResult, start: Start, plan: JobPlan, candidate: Drafter
) -> JobResult:
    """Let an admitted candidate serve; a refused one is not even saved.

    The registry asks for tombstones in its own transactions. Where an erasure came first, the
    drafter's files are deleted: `contaminated`. Where the channel no longer points at what the
    candidate was judged against, the channel stays as it is: `superseded`.
    """
    if result.gate is None or not result.gate.admitted:
        return replace(result, status=JobStatus.REFUSED)
    digest = _save(bench, result, plan, candidate)
    try:
        bench.registry.register(
            digest, scope=plan.scope, inputs=plan.inputs, at_s=bench.clock(), job=plan.job_id
        )
        bench.registry.admit(digest, bench.gate.sign)
        bench.registry.set_channel(
            plan.scope,
            bench.config.serve.channel,
            digest,
            at_s=bench.clock(),
            expected=start.served,
        )
    except DeniedError:
        shutil.rmtree(bench.registry.path(digest), ignore_errors=True)
        return replace(result, status=JobStatus.CONTAMINATED)
    except ConflictError:
        return replace(result, status=JobStatus.SUPERSEDED)
    return replace(result, status=JobStatus.ADMITTED, drafter=digest)


def _save(bench: Workbench, result: JobResult, plan: JobPlan, candidate: Drafter) -> bytes:
    return save_drafter(
        candidate,
        bench.drafters_dir,
        # The job's own start, so that a job killed after this and resumed saves the same drafter.
        created_s=int(plan.started_s),
        parent=result.parent,
        lineage={
            "aliases": len(plan.inputs),
            "traces": len(plan.trace_ids),
            "positions": sum(item.positions for item in plan.inputs),
        },
        measures={name: value for name, value in result.measures.items() if math.isfinite(value)},
    )
