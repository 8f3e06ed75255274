"""Engine: batched speculative decoding under the coupled rule.

Fixed slots, one static cache per model, requests that join and leave between steps, a drafter that
can be swapped between steps. What a request returns depends on its prompt, sampling values, seed
and the target, never on the drafter, the lookahead, its slot or its neighbours, up to near-ties of
floating point between passes of different shape.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from transformers import PreTrainedModel

from draftkeep.errors import BusyError, DraftkeepError, ModelError
from draftkeep.kernels.coupled import Verified, is_end
from draftkeep.serve.admission import check
from draftkeep.serve.counters import Counters
from draftkeep.serve.drafting import DraftModel, LoadedDrafter
from draftkeep.serve.inbox import Inbox, Waiting
from draftkeep.serve.lookahead import LookaheadController, Speculation, Wish
from draftkeep.serve.packed import Packing
from draftkeep.serve.request import Finish, Finished, Request
from draftkeep.serve.row import Row
from draftkeep.serve.runner import PREFILL_CHUNK, ModelRunner, Segment
from draftkeep.serve.stats import EngineStats
from draftkeep.serve.verification import capture, judge, target_pass

# Prompt tokens read between two steps, so that a joining request delays the others by little.
_PREFILL_PER_STEP = 2 * PREFILL_CHUNK
_IDLE_WAIT_S = 0.5


class Engine:
    """Serves requests with one target and at most one drafter.

    `target` is a transformers decoder with sdpa attention; it belongs to the engine from here on.
    `max_context` bounds prompt and output together. `capture_k` is how many of the target's raw
    log-probabilities are kept for each position (0: none), with `capture_branches` also behind
    rejected drafts. `on_finish` is called in the engine's thread after a request's last tokens
    were delivered; whatever it raises is counted and dropped. `on_problem(kind, error)` hears of
    every failure that the engine survives, in the engine's thread; it must be quick, and what it
    raises is ignored.

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
    ) -> None:
        self.slots = slots
        self.max_context = max_context
        self._packing: Packing = packing
        self._clock = clock
        self._on_finish = on_finish
        self._on_problem = on_problem
        self._target = ModelRunner(target, slots=slots, context=max_context, packing=packing)
        self._drafter: LoadedDrafter | None = None
        self._drafter_lost = b""
        self._lookahead = LookaheadController(speculation)
        self._k = min(capture_k, self._target.vocab)
        self._branches = capture_branches
        self._rows: dict[int, Row] = {}
        self._inbox = Inbox(queue)
        self._counters = Counters()
        if speculation.mode == "auto":
            widths = (1, 2, 1 + speculation.lookahead)
            self._measure(self._target, widths, self._lookahead.target_cost.observe)

    @property
    def vocab(self) -> int:
        """The number of token ids the target writes."""
        return self._target.vocab

    def submit(self, request: Request) -> None:
        """Queue a request. Output that would not fit the context ends there with LENGTH.

        Raises InputError for a prompt that is empty, too long or of foreign ids, for max_tokens
        below 1 and for an id in use; BusyError where the queue is full.
        """
        check(request, vocab=self.vocab, max_context=self.max_context)
        self._inbox.put(Waiting(request=request, submitted_s=self._clock()))

    def cancel(self, request_id: str) -> None:
        """Drop a request before the next step: nothing more is delivered but CANCELLED, and
        nothing of it is captured."""
        self._inbox.cancel(request_id)

    def end(self, request_id: str, output_tokens: int) -> None:
        """End a request as if it had stopped by itself after `output_tokens` tokens.

        For stop strings: `on_finish` gets exactly that many. Called from within `on_tokens` it
        takes effect at once, and `on_tokens` is not called again; tokens delivered beyond the end
        are the caller's to discard.
        """
        self._inbox.end(request_id, output_tokens)

    def swap(self, drafter: DraftModel | None) -> None:
        """Use another drafter from the next step on, or none. Running requests go on.

        Raises ModelError where it does not fit; the drafter in use stays then.
        """
        loaded = None
        if drafter is not None:
            loaded = LoadedDrafter(
                drafter,
                target_vocab=self.vocab,
                slots=self.slots,
                context=self.max_context,
                packing=self._packing,
            )
        # Before the swap is seen: the engine may lose this drafter at once.
        self._drafter_lost = b""
        self._inbox.swap(loaded)

    def set_speculation(self, speculation: Speculation) -> None:
        """Speculate otherwise from the next step on. No output depends on it."""
        self._lookahead.speculation = speculation

    def stats(self) -> EngineStats:
        """Counters and state at this moment."""
        drafter = self._drafter
        return EngineStats(
            slots=self.slots,
            running=len(self._rows),
            waiting=len(self._inbox),
            drafter=b"" if drafter is None else drafter.digest,
            drafter_lost=self._drafter_lost,
            speculation=self._lookahead.state(),
            **self._counters.snapshot(),
        )

    def run(self, stop: threading.Event) -> None:
        """Step until `stop` is set, sleeping while there is nothing to do; then close.

        An idle engine sees `stop` after half a second, or at once with `wake`.
        """
        while not stop.is_set():
            if not self.step():
                self._inbox.wait(_IDLE_WAIT_S)
        self.close()

    def wake(self) -> None:
        """End the sleep of an idle `run`, so that it looks at its `stop`."""
        self._inbox.wake()

    def close(self) -> None:
        """Refuse new requests and fail those that wait or run with BusyError."""
        error = BusyError("the engine is stopping; repeat the request on another node")
        for waiting in self._inbox.close():
            self._tell(waiting.request, error)
        for row in list(self._rows.values()):
            self._fail(row, error)

    def step(self) -> bool:
        """One round: swap, cancel, admit, read a piece of waiting prompts, draft, verify, deliver.

        Returns False where there was nothing to do. A failing pass of the target fails the
        requests in flight and leaves the engine ready; a failing pass of the drafter only loses
        the drafter.
        """
        for drafter in self._inbox.take_swap():
            self._install(drafter)
        self._drop_cancelled()
        self._admit()
        if not self._rows:
            return False
        try:
            self._prefill()
            ready = [row for _, row in sorted(self._rows.items()) if row.backlog == 0]
            if ready:
                self._decode(ready)
        except Exception as error:
            self._fail_all(error)
        return True

    def _install(self, drafter: LoadedDrafter | None) -> None:
        self._drafter = drafter
        self._lookahead.new_drafter()
        for row in self._rows.values():
            row.drafter_len = 0
        if drafter is not None and self._lookahead.speculation.mode == "auto":
            try:
                self._measure(drafter.runner, (1,), self._lookahead.draft_cost.observe)
            except RuntimeError as error:
                self._lose_drafter(drafter, error)

    def _measure(
        self,
        runner: ModelRunner,
        widths: Sequence[int],
        observe: Callable[[int, int, float], None],
    ) -> None:
        """Time idle passes for the first plan; live passes correct the figures."""
        for batch in sorted({1, self.slots}):
            for width in widths:
                times = []
                for _ in range(3):
                    start = self._clock()
                    runner.idle_pass(batch, width)
                    times.append(self._clock() - start)
                observe(batch, width, min(times))

    def _drop_cancelled(self) -> None:
        cancelled, unstarted = self._inbox.take_cancelled()
        for waiting in unstarted:
            self._inbox.forget(waiting.request.request_id)
            self._counters.add(cancelled=1)
            with suppress(Exception):
                waiting.request.on_tokens([], Finish.CANCELLED)
        for row in list(self._rows.values()):
            request = row.request
            if request.request_id in cancelled:
                self._release(row)
                self._counters.add(cancelled=1)
                with suppress(Exception):
                    request.on_tokens([], Finish.CANCELLED)
            elif (length := self._inbox.end_of(request.request_id)) is not None:
                self._finish_early(row, length)

    def _admit(self) -> None:
        free = [slot for slot in range(self.slots) if slot not in self._rows]
        for slot in free:
            waiting = self._inbox.take()
            if waiting is None:
                return
            request = waiting.request
            self._rows[slot] = Row(
                request,
                slot=slot,
                budget=min(request.max_tokens, self.max_context - len(request.prompt_ids)),
                vocab=self.vocab,
                k=self._k if request.capture else 0,
                submitted_s=waiting.submitted_s,
            )
            self._counters.add(prompt_tokens=len(request.prompt_ids))

    def _prefill(self) -> None:
        """Read a bounded piece of the prompts that are not read yet, oldest request first."""
        left = _PREFILL_PER_STEP
        segments, joining = [], [row for row in self._rows.values() if row.backlog]
        for row in sorted(joining, key=lambda row: row.submitted_s):
            count = min(row.backlog, PREFILL_CHUNK)
            if count > left:
                break
            left -= count
            start = row.target_len
            tokens = row.tokens[start : start + count]
            segments.append(Segment(slot=row.slot, tokens=tokens, start=start))
            row.target_len += count
        self._target.prefill(segments)

    def _decode(self, rows: list[Row]) -> None:
        self._draft(rows)
        started = self._clock()
        logits_NV = target_pass(self._target, rows)
        verdicts = judge(logits_NV, rows)
        width = 1 + max(len(row.drafts) for row in rows)
        self._lookahead.target_cost.observe(len(rows), width, self._clock() - started)
        try:
            capture(logits_NV, rows, verdicts, k=self._k, branches=self._branches)
        except Exception as error:
            self._problem("capture", error)
            for row in rows:
                self._counters.add(capture_failed=int(row.k > 0))
                row.stop_capture()
        self._counters.add(steps=1, row_steps=len(rows))
        for row, verdict in zip(rows, verdicts, strict=True):
            if isinstance(verdict, Verified):
                self._emit(row, verdict)
            else:
                self._problem("a request", verdict)
                self._fail(row, verdict)

    def _draft(self, rows: list[Row]) -> None:
        """Fill the drafts of every row, as many as the plan says."""
        drafter = self._drafter
        wishes = [
            Wish(
                group=row.request.group,
                cap=min(row.remaining - 1, drafter.room(row)) if drafter else 0,
            )
            for row in rows
        ]
        counts = self._lookahead.plan(wishes, running=len(rows), drafter=drafter is not None)
        for row in rows:
            row.drafts = []
        if drafter is None or not any(counts):
            return
        try:
            drafter.propose(rows, counts, self._timed)
        except Exception as error:
            # The target does not depend on the drafter, so a broken one costs speed alone.
            self._lose_drafter(drafter, error)
            for row in rows:
                row.drafts = []
        self._counters.add(drafted=sum(len(row.drafts) for row in rows))

    def _timed(self, batch: int, work: Callable[[], None]) -> None:
        started = self._clock()
        work()
        self._lookahead.draft_cost.observe(batch, 1, self._clock() - started)

    def _lose_drafter(self, drafter: LoadedDrafter, error: Exception) -> None:
        self._drafter = None
        self._drafter_lost = drafter.digest
        self._problem(f"drafter {drafter.digest.hex()[:12]}", error)
        self._counters.add(drafter_failed=1)
        self._lookahead.new_drafter()

    def _emit(self, row: Row, verdict: Verified) -> None:
        """Take a step's tokens, deliver them, and close the request where they end it."""
        request = row.request
        self._lookahead.observe(request.group, verdict.tested, verdict.accepted)
        digest = b"" if self._drafter is None else self._drafter.digest
        row.accept(verdict.tokens, verdict.accepted, digest)
        self._counters.add(
            output_tokens=len(verdict.tokens), tested=verdict.tested, accepted=verdict.accepted
        )
        if row.first_s is None:
            row.first_s = self._clock()
        finish = None
        if is_end(verdict.tokens[-1], request.sampling):
            finish = Finish.STOP
        elif row.remaining == 0:
            finish = Finish.LENGTH
        try:
            request.on_tokens(list(verdict.tokens), finish)
        except Exception as error:
            self._callback_failed(error)
            self._counters.add(cancelled=1)
            self._release(row)
            return
        length = self._inbox.end_of(request.request_id)
        if length is not None:
            self._finish_early(row, length)
        elif finish is not None:
            self._finish(row, finish, row.output_len)

    def _finish_early(self, row: Row, length: int) -> None:
        self._finish(row, Finish.STOP, min(length, row.output_len))

    def _finish(self, row: Row, finish: Finish, length: int) -> None:
        self._release(row)
        self._counters.add(finished=1)
        try:
            self._on_finish(row.finished(finish, length=length, now_s=self._clock()))
        except Exception as error:
            self._callback_failed(error)

    def _release(self, row: Row) -> None:
        del self._rows[row.slot]
        self._inbox.forget(row.request.request_id)

    def _fail(self, row: Row, error: DraftkeepError) -> None:
        self._release(row)
        self._tell(row.request, error)

    def _fail_all(self, error: Exception) -> None:
        """A pass failed: no slot can be trusted, so every request in flight ends here."""
        self._problem("a pass of the target", error)
        self._target.clear()
        told = ModelError(
            f"a pass of the target failed with {type(error).__name__}; the request was lost: "
            "repeat it, and see the server's log if it happens again"
        )
        for row in list(self._rows.values()):
            self._fail(row, told)

    def _tell(self, request: Request, error: DraftkeepError) -> None:
        self._inbox.forget(request.request_id)
        self._counters.add(failed=1)
        try:
            request.on_error(error)
        except Exception as raised:
            self._callback_failed(raised)

    def _callback_failed(self, error: Exception) -> None:
        self._counters.add(callback_failed=1)
        self._problem("a callback", error)

    def _problem(self, kind: str, error: BaseException) -> None:
        with suppress(Exception):
            self._on_problem(kind, error)
