"""Engine: batched speculative decoding.

Fixed slots, one static cache per model, requests that join and leave between steps, a drafter that
can be swapped between steps. Under the coupled rule what a request returns depends on its prompt,
sampling values, seed and the target, never on the drafter, the lookahead, its slot or its
neighbours, up to near-ties of floating point between passes of different shape. Under rejection its
law does not depend on the drafter, but its tokens do, since they are drawn from the drafts.
"""

import threading
import time
from collections.abc import Callable

from transformers import PreTrainedModel

from draftkeep.errors import DraftkeepError, ModelError, UnavailableError
from draftkeep.kernels.outcome import Verified
from draftkeep.serve.engine.callers import Callers
from draftkeep.serve.engine.counters import Counters
from draftkeep.serve.engine.decode_step import DecodeStep
from draftkeep.serve.engine.drafting import Drafter, DraftModel
from draftkeep.serve.engine.inbox import Inbox, Waiting
from draftkeep.serve.engine.logprobs import Logprobs
from draftkeep.serve.engine.lookahead import Speculation
from draftkeep.serve.engine.model_drafter import ModelDrafter
from draftkeep.serve.engine.recorder import Recorder
from draftkeep.serve.engine.request import Emission, Finish, Finished, Request, RowStep, StepReport
from draftkeep.serve.engine.request_check import check_request
from draftkeep.serve.engine.row import Row
from draftkeep.serve.engine.scheduler import Scheduler
from draftkeep.serve.engine.speculator import Speculator
from draftkeep.serve.engine.stats import EngineStats
from draftkeep.serve.engine.verification import Verification
from draftkeep.serve.passes.packed import Packing
from draftkeep.serve.passes.runner import ModelRunner

_IDLE_WAIT_S = 0.5


class Engine:
    """Serves requests with one target and at most one drafter.

    `target` is a transformers decoder with sdpa attention; it belongs to the engine from here on.
    `max_context` bounds prompt and output together. `capture_k` is how many of the target's raw
    log-probabilities are kept for each position (0: none), with `capture_branches` also behind
    rejected drafts. `verification` is the rule by which drafts are judged: `coupled`, whose output
    a seed alone decides, or `rejection`, the ratio test of the papers. `floor` drafts where no
    model does.

    Requests beyond `slots` wait in a line of at most `queue`. With `preempt_after_s` above 0 a
    request that has waited longer takes the slot of the one that has held its own longest, which
    goes on later from where it was; no output changes.

    `on_finish` is called in the engine's thread after a request's last tokens were delivered, and
    `on_step` after every decoding step; whatever they raise is counted and dropped.
    `on_problem(kind, error)` hears of every failure that the engine survives, in the engine's
    thread; it must be quick, and what it raises is ignored.

    submit, cancel, end, swap, wake and stats may be called from any thread; step, run and close
    belong to one. Raises ModelError for a model it cannot serve.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        *,
        slots: int,
        max_context: int,
        speculation: Speculation,
        capture_k: int,
        on_finish: Callable[[Finished], None],
        on_problem: Callable[[str, BaseException], None] = lambda kind, error: None,
        queue: int = 256,
        capture_branches: bool = False,
        packing: Packing = "measured",
        clock: Callable[[], float] = time.monotonic,
        verification: Verification = "coupled",
        floor: Drafter | None = None,
        preempt_after_s: float = 0.0,
        on_step: Callable[[StepReport], None] = lambda report: None,
    ) -> None:
        self.slots = slots
        self.max_context = max_context
        self._packing: Packing = packing
        self._verification: Verification = verification
        self._clock = clock
        self._counters = Counters()
        self._callers = Callers(
            self._counters, on_finish=on_finish, on_problem=on_problem, on_step=on_step
        )
        problem = self._callers.problem
        self._target = ModelRunner(
            target, slots=slots, context=max_context, packing=packing, on_problem=problem
        )
        k = min(capture_k, self._target.vocab)
        self._speculator = Speculator(
            speculation, self._counters, slots=slots, floor=floor, clock=clock, on_problem=problem
        )
        self._recorder = Recorder(
            self._counters, k=k, branches=capture_branches, clock=clock, on_problem=problem
        )
        self._decode_step = DecodeStep(
            self._target, self._speculator, self._recorder, verification=verification, clock=clock
        )
        self._inbox = Inbox(queue)
        self._scheduler = Scheduler(
            self._inbox,
            self._counters,
            slots=slots,
            vocab=self._target.vocab,
            context=max_context,
            preempt_after_s=preempt_after_s,
            k=k,
            processed=verification == "rejection",
        )
        self._rows = self._scheduler.rows
        self._speculator.measure_target(self._target.idle_pass)
        self._speculator.install(None, ())
        self._beat_s = clock()

    @property
    def beat_s(self) -> float:
        """When the engine's loop last came round, by the engine's clock. Any thread.

        Taken at the start of every step, between reading prompts and decoding, and before `run`
        sleeps, which it does for half a second at most. While a pass hangs it stands still.
        """
        return self._beat_s

    @property
    def vocab(self) -> int:
        """The number of token ids the target writes."""
        return self._target.vocab

    def submit(self, request: Request) -> None:
        """Queue a request. Output that would not fit the context ends there with LENGTH.

        Raises InputError for a prompt that is empty, too long or of foreign ids, for max_tokens
        below 1, for other values out of range and for an id in use; BusyError where the line is
        full; UnavailableError once the engine was closed.
        """
        check_request(request, vocab=self.vocab, max_context=self.max_context)
        self._inbox.put(Waiting(request=request, queued_s=self._clock()))

    def cancel(self, request_id: str) -> None:
        """Drop a request before the next step: nothing more is delivered but CANCELLED, and
        nothing of it is captured."""
        self._inbox.cancel(request_id)

    def end(self, request_id: str, output_tokens: int) -> None:
        """End a request as if it had stopped by itself after `output_tokens` tokens.

        For stop strings: `on_finish` gets exactly that many. Called from within `on_tokens` it
        takes effect at once, and neither `on_tokens` is called again nor anything beyond the end
        counted; tokens delivered beyond the end are the caller's to discard.
        """
        self._inbox.end(request_id, output_tokens)

    def swap(self, drafter: DraftModel | None) -> None:
        """Use another drafter from the next step on, or the floor. Running requests go on.

        Raises ModelError where it does not fit; the drafter in use stays then.
        """
        loaded = None
        if drafter is not None:
            loaded = ModelDrafter(
                drafter,
                target_vocab=self.vocab,
                slots=self.slots,
                context=self.max_context,
                packing=self._packing,
                verification=self._verification,
                clock=self._clock,
                on_problem=self._callers.problem,
            )
        # Before the swap is seen: the engine may lose this drafter at once.
        self._speculator.forget_loss()
        self._inbox.swap(loaded)

    def set_speculation(self, speculation: Speculation) -> None:
        """Speculate otherwise from the next step on. Under the coupled rule no output depends on
        it."""
        self._speculator.speculate(speculation)

    def stats(self) -> EngineStats:
        """Counters and state at this moment."""
        rows = list(self._rows.values())
        return EngineStats(
            slots=self.slots,
            running=len(rows),
            waiting=len(self._inbox),
            known=self._inbox.known,
            leaving=self._inbox.leaving,
            drafter=self._speculator.digest,
            drafter_lost=self._speculator.lost,
            verification=self._verification,
            decoder=self._target.decoder,
            packed=self._target.packed,
            kv_used_share=sum(row.target_len for row in rows) / (self.slots * self.max_context),
            speculation=self._speculator.state(),
            **self._counters.snapshot(),
        )

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set, sleeping while there is nothing to do; then close.

        An idle engine sees `stop` after half a second, or at once with `wake`.
        """
        while not stop.is_set():
            if not self.step():
                self._beat_s = self._clock()
                self._inbox.wait(_IDLE_WAIT_S)
        self.close()

    def wake(self) -> None:
        """End the sleep of an idle `run`, so that it looks at its `stop`."""
        self._inbox.wake()

    def close(self) -> None:
        """Refuse new requests and fail those that wait or run with UnavailableError."""
        error = UnavailableError("the engine is stopping; repeat the request on another node")
        for waiting in self._inbox.close():
            self._inbox.forget(waiting.request.request_id)
            self._callers.fail(waiting.request, error)
        for row in list(self._rows.values()):
            self._fail(row, error)

    def step(self) -> bool:
        """One round: swap, cancel, admit, read a piece of waiting prompts, draft, verify, deliver.

        Returns False where there was nothing to do. A failing pass of the target fails the
        requests that hold a slot and leaves the engine ready; a failing pass of the drafter only
        loses the drafter.
        """
        self._beat_s = self._clock()
        for drafter in self._inbox.take_swap():
            self._speculator.install(drafter, list(self._rows.values()))
        self._drop()
        parked = self._scheduler.admit(self._clock())
        if parked is not None:
            self._speculator.forget(parked)
        if not self._rows:
            return False
        try:
            self._target.prefill(self._scheduler.reading_turn())
            self._beat_s = self._clock()
            ready = self._scheduler.ready()
            if ready:
                self._decode(ready)
        except Exception as error:
            self._fail_all(error)
        return True

    def _drop(self) -> None:
        """Let go of what was cancelled or ended since the last step, with a slot or without."""
        cancelled, in_line = self._inbox.take_cancelled()
        for waiting in in_line:
            self._inbox.forget(waiting.request.request_id)
            self._callers.cancelled(waiting.request)
        for row, asked in self._inbox.take_ended():
            self._finish_early(row, asked)
        for row in list(self._rows.values()):
            if row.request.request_id in cancelled:
                self._scheduler.release(row)
                self._callers.cancelled(row.request)
            elif (length := self._inbox.end_of(row.request.request_id)) is not None:
                self._finish_early(row, length)

    def _decode(self, rows: list[Row]) -> None:
        started_s = self._clock()
        decoded = self._decode_step.run(rows)
        now_s = self._clock()
        self._counters.add(steps=1, row_steps=len(rows))
        reports: list[RowStep] = []
        over: list[tuple[Row, Finish, int, float]] = []
        for row, verdict, logprobs in zip(rows, decoded.verdicts, decoded.logprobs, strict=True):
            if isinstance(verdict, Verified):
                report, ending = self._emit(row, verdict, logprobs, decoded.drafter, now_s)
                reports.append(report)
                if ending is not None:
                    over.append((row, *ending, self._clock()))
            else:
                self._callers.problem("a request", verdict)
                self._fail(row, verdict)
        # Behind everybody's tokens, which do not wait for what is kept of them.
        self._recorder.capture()
        for row, finish, length, delivered_s in over:
            self._finish(row, finish, length, delivered_s)
        self._callers.step(
            StepReport(
                drafter=decoded.drafter if decoded.drafted else b"",
                width=decoded.width,
                draft_s=decoded.draft_s,
                verify_s=decoded.verify_s,
                total_s=self._clock() - started_s,
                rows=tuple(reports),
            )
        )

    def _emit(
        self, row: Row, verdict: Verified, logprobs: Logprobs, drafter: bytes, now_s: float
    ) -> tuple[RowStep, tuple[Finish, int] | None]:
        """Take a step's tokens and deliver them; how and at which length the request ends with
        them, or None."""
        request, start, gap_s = row.request, row.output_len, now_s - row.last_s
        row.take(verdict, drafter, now_s)
        finish = row.ending
        emission = Emission(tokens=tuple(verdict.tokens), finish=finish, logprobs=logprobs)
        received = self._callers.emit(request, emission)
        length = self._inbox.end_of(request.request_id)
        ended = finish is not None or length is not None
        kept = len(verdict.tokens)
        if length is not None:
            kept = min(kept, max(0, length - start))
        report = RowStep(
            group=request.group,
            first=start == 0,
            drafted=min(len(row.drafts), kept) if ended else len(row.drafts),
            tested=min(verdict.tested, kept),
            accepted=min(verdict.accepted, kept),
            emitted=kept,
            gap_s=gap_s,
        )
        self._count(report)
        if not received:
            self._counters.add(cancelled=1)
            self._scheduler.release(row)
            return report, None
        if length is not None:
            return report, (Finish.STOP, min(length, row.output_len))
        return report, None if finish is None else (finish, row.output_len)

    def _count(self, report: RowStep) -> None:
        self._speculator.observe(report.group, report.tested, report.accepted)
        self._counters.add(
            output_tokens=report.emitted,
            drafted=report.drafted,
            tested=report.tested,
            accepted=report.accepted,
        )

    def _finish_early(self, row: Row, length: int) -> None:
        """End where the caller said, or where the output is if that is shorter."""
        self._finish(row, Finish.STOP, min(length, row.output_len), self._clock())

    def _finish(self, row: Row, finish: Finish, length: int, delivered_s: float) -> None:
        self._scheduler.release(row)
        self._recorder.settle()
        self._callers.finish(row.finished(finish, length=length, now_s=delivered_s))

    def _fail(self, row: Row, error: DraftkeepError) -> None:
        self._scheduler.release(row)
        self._callers.fail(row.request, error)

    def _fail_all(self, error: Exception) -> None:
        """A pass failed: no slot can be trusted, so every request that holds one ends here."""
        self._callers.problem("a pass of the target", error)
        self._target.clear()
        told = ModelError(
            f"a pass of the target failed with {type(error).__name__}; the request was lost: "
            "repeat it, and see the server's log if it happens again"
        )
        for row in list(self._rows.values()):
            self._fail(row, told)
