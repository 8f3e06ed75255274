"""One distillation job, from selection to the channel.

    select -> baseline -> train -> evaluate -> gate -> save, register, sign -> channel

A job is recorded in the catalog before it opens anything, so that an erasure finds it. One that
learned from erased traces leaves nothing behind; one that was stopped is resumed by the next call.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from draftkeep.config import Config
from draftkeep.distill import selection, workspace
from draftkeep.distill.evaluate import Evaluation, evaluate
from draftkeep.distill.judge import judge
from draftkeep.distill.progress import JobProgress, Poll
from draftkeep.distill.publish import publish
from draftkeep.distill.result import JobResult, JobStatus
from draftkeep.distill.resume import resumable
from draftkeep.distill.selection import Opened, Selection
from draftkeep.distill.start import Start, choose_start
from draftkeep.distill.trainer import Trainer, TrainResult
from draftkeep.distill.vocabulary import choose_vocabulary
from draftkeep.distill.workbench import Workbench, open_workbench
from draftkeep.distill.workspace import JobPlan
from draftkeep.errors import ConflictError, DraftkeepError
from draftkeep.ingest.record import SealedTrace
from draftkeep.store.jobs import end_job, is_contaminated, start_job
from draftkeep.store.models.drafter import Drafter, with_vocab
from draftkeep.store.reader import count_left_out


def run_job(
    config: Config,
    *,
    tenant: str,
    progress: Callable[[JobProgress], None] = lambda report: None,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.time,
    timer: Callable[[], float] = time.perf_counter,
    random: Callable[[int], bytes] = os.urandom,
) -> JobResult:
    """Train a drafter for one tenant, and let it serve if the gate admits it.

    Goes on with the tenant's stopped job where there is one. `stop` is asked before every update;
    once it is true, or on SIGINT (raised as KeyboardInterrupt), a checkpoint is left for the next
    call. What served before goes on serving unless the status is `admitted`. `clock` is Unix time,
    `timer` any clock that never goes back.

    Raises BusyError where another job runs, and ModelError, StoreError or ConfigError where
    target, store or keys cannot be used.
    """
    if config.model.threads:
        torch.set_num_threads(config.model.threads)
    with (
        workspace.only_job(config.state_dir / "jobs"),
        open_workbench(config, tenant=tenant, clock=clock) as bench,
    ):
        return _Job(bench=bench, progress=progress, stop=stop, timer=timer, random=random).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    bench: Workbench
    progress: Callable[[JobProgress], None]
    stop: Callable[[], bool]
    timer: Callable[[], float]
    random: Callable[[int], bytes]

    def run(self) -> JobResult:
        bench = self.bench
        start = choose_start(bench)
        plan = resumable(
            bench.catalog, bench.jobs_dir, scope=bench.scope, base=start.base, at_s=bench.clock()
        )
        result = JobResult(
            job_id=plan.job_id if plan else self.random(8).hex(),
            scope=bench.scope,
            status=JobStatus.TOO_FEW_TRACES,
            parent=start.parent,
        )
        sealed = self._sealed()
        if plan is None and len(sealed) < bench.config.distill.min_traces:
            return replace(result, counts={"sealed": len(sealed)})
        try:
            self._record_start(result, sealed)
        except ConflictError:
            return self._close(replace(result, status=JobStatus.CONTAMINATED))
        try:
            return self._close(self._distil(result, start, plan, sealed))
        except DraftkeepError as error:
            self._close(result, status=type(error).__name__)
            raise

    def _distil(
        self, result: JobResult, start: Start, plan: JobPlan | None, sealed: Sequence[SealedTrace]
    ) -> JobResult:
        found = self._open(sealed)
        if plan is not None:
            known = set(plan.trace_ids)
            found.training[:] = [i for i in found.training if i.header.trace_id in known]
        result = replace(result, counts=_counts(found), skipped=self._skipped(found))
        if plan is None and len(found.training) < self.bench.config.distill.min_traces:
            return result
        if plan is None:
            plan = self._plan(result.job_id, start.base, found.training)
        # Before training, which changes the incumbent's own layers in place.
        before = self._evaluate("baseline", start.incumbent, found.held_out)
        ids_D = torch.tensor(plan.vocab_ids, dtype=torch.int64)
        candidate = with_vocab(start.weights, self.bench.target, ids_D)
        trained = self._train(plan, candidate, found)
        result = replace(result, before=before, measures=_training_measures(trained))
        if self._contaminated(plan.job_id):
            return replace(result, status=JobStatus.CONTAMINATED)
        if not trained.finished:
            stopped = JobStatus.INTERRUPTED if self.stop() else JobStatus.TOO_FEW_TRACES
            return replace(result, status=stopped)
        found.held_out[:] = selection.living(self.bench.keys, found.held_out)
        after = self._evaluate("evaluate", candidate, found.held_out)
        result = judge(self.bench, result, candidate, after, found.held_out)
        return publish(self.bench, result, start, plan, candidate)

    def _sealed(self) -> list[SealedTrace]:
        return selection.list_sealed(
            self.bench.catalog,
            self.bench.storage,
            tenant=self.bench.tenant,
            target=self.bench.target.target_fingerprint,
            now_s=self.bench.clock(),
        )

    def _record_start(self, result: JobResult, sealed: Sequence[SealedTrace]) -> None:
        start_job(
            self.bench.catalog,
            result.job_id,
            scope=result.scope,
            parent=result.parent,
            inputs=selection.inputs_of(item.parsed for item in sealed),
            at_s=self.bench.clock(),
        )

    def _open(self, sealed: Sequence[SealedTrace]) -> Selection:
        return selection.open_all(
            sealed,
            opener=self.bench.opener,
            decode=self.bench.decode,
            target=self.bench.target,
            progress=lambda done: self.progress(
                JobProgress(stage="select", fraction=done / len(sealed))
            ),
        )

    def _skipped(self, found: Selection) -> dict[str, int]:
        left_out = count_left_out(
            self.bench.catalog,
            tenant=self.bench.tenant,
            target=self.bench.target.target_fingerprint,
            now_s=self.bench.clock(),
        )
        reasons = sorted({*left_out, *found.skipped})
        return {name: left_out.get(name, 0) + found.skipped.get(name, 0) for name in reasons}

    def _plan(self, job_id: str, base: str, training: Sequence[Opened]) -> JobPlan:
        target = self.bench.target
        vocab_ids_D = choose_vocabulary(
            [item.trace for item in training],
            size=self.bench.config.distill.vocab,
            keep=(*target.eos_ids, *target.tokenizer.all_special_ids),
            total=target.vocab,
        )
        plan = JobPlan(
            job_id=job_id,
            scope=self.bench.scope,
            base=base,
            started_s=self.bench.clock(),
            trace_ids=tuple(item.header.trace_id for item in training),
            inputs=tuple(selection.inputs_of(item.header for item in training)),
            vocab_ids=tuple(vocab_ids_D.tolist()),
        )
        workspace.save_plan(self.bench.jobs_dir / job_id, plan)
        return plan

    def _train(self, plan: JobPlan, candidate: Drafter, found: Selection) -> TrainResult:
        trainer = Trainer(
            candidate,
            found.training,
            self.bench.recipe,
            run=plan.job_id,
            held_out=found.held_out,
            directory=self.bench.jobs_dir / plan.job_id,
            living=lambda items: selection.living(self.bench.keys, items),
            timer=self.timer,
        )
        contaminated = Poll(lambda: self._contaminated(plan.job_id), timer=self.timer)
        return trainer.run(
            progress=lambda report: self.progress(
                JobProgress(stage="train", fraction=report.fraction, train=report)
            ),
            stop=lambda: self.stop() or contaminated(),
        )

    def _evaluate(self, stage: str, drafter: Drafter, held_out: Sequence[Opened]) -> Evaluation:
        self.progress(JobProgress(stage=stage, fraction=0.0))
        serve = self.bench.config.serve
        found = evaluate(drafter, held_out, context=serve.max_context, lookahead=serve.lookahead)
        self.progress(JobProgress(stage=stage, fraction=1.0))
        return found

    def _contaminated(self, job_id: str) -> bool:
        return is_contaminated(self.bench.catalog, job_id)

    def _close(self, result: JobResult, status: str | None = None) -> JobResult:
        """Remove what is on disk and record the end; an interrupted job keeps both for later."""
        if result.status is JobStatus.INTERRUPTED:
            return result
        # First: an erasure looks for checkpoints of jobs that have not ended.
        workspace.drop(self.bench.jobs_dir / result.job_id)
        record = result.as_json()
        end_job(
            self.bench.catalog,
            result.job_id,
            failed=status is not None or result.status not in _JUDGED,
            drafter=result.drafter,
            record=record if status is None else {**record, "status": status},
            at_s=self.bench.clock(),
        )
        return result


_JUDGED = (JobStatus.ADMITTED, JobStatus.REFUSED, JobStatus.SUPERSEDED)


def _counts(found: Selection) -> dict[str, int]:
    return {
        "training_traces": len(found.training),
        "training_positions": sum(item.trace.positions for item in found.training),
        "held_out_traces": len(found.held_out),
        "held_out_positions": sum(item.trace.positions for item in found.held_out),
    }


def _training_measures(trained: TrainResult) -> dict[str, float]:
    return {
        "train_seconds": trained.seconds,
        "train_steps": float(trained.steps),
        "train_loss": trained.loss,
    }
