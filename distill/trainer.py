"""Trainer: a run of updates over opened traces, resumable, interruptible, bound by deadlines."""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from draftkeep.distill.batch import tokens_of
from draftkeep.distill.checkpoint import (
    TrainState,
    delete_checkpoint,
    load_checkpoint,
    save_checkpoint,
)
from draftkeep.distill.interrupt import deferred_interrupt
from draftkeep.distill.learner import Learner
from draftkeep.distill.recipe import Recipe
from draftkeep.distill.selection import Opened
from draftkeep.store.models.drafter import Drafter

_SMOOTHING = 0.05
_WATCHED_TRACES = 16
_RECHECK_S, _RECHECK_MAX_S = 1.0, 60.0
# Asking about many subjects takes time; at most a twentieth of it goes there.
_RECHECK_SHARE = 20.0
_MEASURE_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainProgress:
    """One report, made after every update. `fraction` of the budget is used.

    `loss` is a running mean in nats a position. `agreement` is the share of watched positions
    where the drafter's best token is the target's best; None in reports that did not measure it.
    """

    step: int
    seconds: float
    fraction: float
    loss: float
    agreement: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """How a run ended. `finished` is False where it stopped before its budget was used."""

    steps: int
    epochs: int
    seconds: float
    loss: float
    finished: bool


class Trainer:
    """One run over a drafter, whose weights it changes in place.

    `examples` are the traces to learn from, all trainable; on the first few of `held_out` agreement
    is measured. `living` is asked once a second (less often where that takes long, at least once a
    minute) which traces may still be read; the others are removed from both lists, the caller's
    own, before the next update. `directory` holds the
    checkpoint (None: none is written). `run` names the run: a checkpoint of the same run is
    resumed, one of another is deleted.
    """

    def __init__(
        self,
        drafter: Drafter,
        examples: list[Opened],
        recipe: Recipe,
        *,
        run: str,
        held_out: list[Opened],
        directory: Path | None = None,
        living: Callable[[Sequence[Opened]], list[Opened]] = list,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._recipe = recipe
        self._directory = directory
        self._living = living
        self._timer = timer
        self._examples = examples
        self._held_out = held_out
        self._learner = Learner(drafter, bfloat16=recipe.bfloat16)
        self._plan: list[list[int]] = []
        self.state = TrainState(run=run, inputs=_inputs_key(self._examples))
        self._resume()

    def run(
        self,
        *,
        progress: Callable[[TrainProgress], None] = lambda report: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> TrainResult:
        """Train until the budget is used, `stop()` is true, or nothing is left to learn from.

        It then writes a checkpoint. In the main thread SIGINT waits for the update in flight, and
        is raised as KeyboardInterrupt after the checkpoint. Where an update itself fails, the
        checkpoint before it stays.
        """
        try:
            with deferred_interrupt() as interrupted:
                self._loop(progress, lambda: interrupted() or stop())
                self.save()
        finally:
            self._learner.rest()
        return self._result()

    def _loop(self, progress: Callable[[TrainProgress], None], stop: Callable[[], bool]) -> None:
        saved_s = self._timer()
        check_at_s = saved_s + _RECHECK_S
        measured_s = -math.inf
        while self._fraction() < 1.0 and not stop():
            if self._timer() >= check_at_s:
                check_at_s = self._drop_dead()
            if not self._examples:
                return
            self._update()
            due = bool(self._held_out) and self._timer() - measured_s >= _MEASURE_S
            progress(self._report(measure=due))
            measured_s = self._timer() if due else measured_s
            if self._timer() - saved_s >= self._recipe.checkpoint_s:
                self.save()
                saved_s = self._timer()

    def save(self) -> None:
        """Write the checkpoint, where there is a directory for it."""
        if self._directory is not None:
            tensors = self._learner.state(self.state.step)
            save_checkpoint(self._directory, self.state, tensors)

    def _resume(self) -> None:
        found = load_checkpoint(self._directory) if self._directory is not None else None
        if found is None or self._directory is None:
            return
        state, tensors = found
        if state.run != self.state.run:
            delete_checkpoint(self._directory)
            return
        self._learner.restore(state.step, tensors)
        # Other traces make another plan, so a pass that began over the old ones cannot be ended.
        if state.inputs != self.state.inputs:
            state = _next_pass(state, inputs=self.state.inputs)
        self.state = state

    def _update(self) -> None:
        started_s = self._timer()
        before = self.state
        traces = [self._examples[index].trace for index in self._next_batch()]
        rate = self._recipe.rate(before.step, before.seconds)
        loss = self._learner.update(traces, rate=rate)
        known = before.loss
        self.state = replace(
            self.state,
            step=before.step + 1,
            batch=self.state.batch + 1,
            seconds=before.seconds + self._timer() - started_s,
            loss=loss if known is None else known + _SMOOTHING * (loss - known),
        )

    def _next_batch(self) -> list[int]:
        if not self._plan:
            self._plan = self._plan_pass()
        # Also true right after a resume, where the checkpoint was made at the end of a pass.
        if self.state.batch >= len(self._plan):
            self.state = _next_pass(self.state, inputs=self.state.inputs)
            self._plan = self._plan_pass()
        return self._plan[self.state.batch]

    def _plan_pass(self) -> list[list[int]]:
        tokens = [len(tokens_of(item.trace)) for item in self._examples]
        return self._recipe.plan(self.state.epoch, tokens)

    def _drop_dead(self) -> float:
        """Forget what may no longer be read; returns when to ask again."""
        asked_s = self._timer()
        before = len(self._examples)
        self._held_out[:] = self._living(self._held_out)
        self._examples[:] = self._living(self._examples)
        if len(self._examples) < before:
            self._plan = []
            self.state = _next_pass(self.state, inputs=_inputs_key(self._examples))
        now_s = self._timer()
        return now_s + min(max(_RECHECK_S, _RECHECK_SHARE * (now_s - asked_s)), _RECHECK_MAX_S)

    def _fraction(self) -> float:
        return self._recipe.fraction(self.state.step, self.state.seconds)

    def _report(self, *, measure: bool) -> TrainProgress:
        watched = [item.trace for item in self._held_out[:_WATCHED_TRACES]]
        return TrainProgress(
            step=self.state.step,
            seconds=self.state.seconds,
            fraction=self._fraction(),
            loss=self.state.loss or 0.0,
            agreement=self._learner.agreement(watched) if measure else None,
        )

    def _result(self) -> TrainResult:
        return TrainResult(
            steps=self.state.step,
            epochs=self.state.epoch,
            seconds=self.state.seconds,
            loss=self.state.loss or 0.0,
            finished=self._fraction() >= 1.0,
        )


def _next_pass(state: TrainState, *, inputs: str) -> TrainState:
    return replace(state, epoch=state.epoch + 1, batch=0, inputs=inputs)


def _inputs_key(examples: Sequence[Opened]) -> str:
    """What the traces are, in their order."""
    digest = hashlib.sha256()
    for item in examples:
        digest.update(item.header.trace_id)
    return digest.hexdigest()
