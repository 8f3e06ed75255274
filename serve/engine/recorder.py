"""Recorder: the target's raw distributions at the positions a step emits, kept for capture.

Shapes: N logit rows of the pass, P of them looked through, V target vocabulary, K entries kept.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from draftkeep.breaker import Breaker
from draftkeep.errors import DraftkeepError
from draftkeep.kernels.outcome import Verified
from draftkeep.serve.engine.counters import Counters
from draftkeep.serve.engine.host_copy import HostCopy
from draftkeep.serve.engine.request import RejectedBranch
from draftkeep.serve.engine.row import Row
from draftkeep.serve.engine.spans import Span, emitted, look_through

# Steps in a row whose capture failed before it pauses.
_FAILURES = 3


class Recorder:
    """Captures steps, one after another, for the engine's thread. No request fails with it.

    `k` log-probabilities of each position are captured for rows that capture, with `branches` also
    those behind a rejected draft. A step is captured in three turns, so that no token waits for it:
    `note` before the rows take their tokens, `capture` once these are delivered, and `settle` when
    the values are needed, so that a device need not be waited for.

    What fails loses the capture of the step's requests. After a few failures in a row capture
    pauses, longer each time, and requests under way lose theirs as well; then one step tries.
    `on_problem(kind, error)` hears of each failure, but of a pause only once when it begins and
    once, with the last error, when a try goes well again.
    """

    def __init__(
        self,
        counters: Counters,
        *,
        k: int,
        branches: bool,
        clock: Callable[[], float],
        on_problem: Callable[[str, BaseException], None],
    ) -> None:
        self._k = k
        self._branches = branches
        self._clock = clock
        self._counters = counters
        self._on_problem = on_problem
        self._breaker = Breaker(threshold=_FAILURES)
        self._last_error: Exception | None = None
        self._noted: tuple[Tensor, list[Span]] | None = None
        self._pending: tuple[list[Span], HostCopy] | None = None

    def note(
        self, logits_NV: Tensor, rows: Sequence[Row], verdicts: Sequence[Verified | DraftkeepError]
    ) -> None:
        """Keep what a step's `verdicts` emit, to be captured.

        Must run before the rows take their tokens. logits_NV holds drafts + 1 rows of each of
        `rows`, one request after another, and must not be written to before the next `note`.
        """
        self.settle()
        spans = [self._extended(span) for span in emitted(rows, verdicts) if span.row.k]
        if not spans:
            return
        if self._breaker.wait_s(self._clock()) > 0:
            self._lose(spans)
        else:
            self._noted = (logits_NV, spans)

    def capture(self) -> None:
        """Look through what was noted; on a device this only starts it."""
        if self._noted is None:
            return
        (logits_NV, spans), self._noted = self._noted, None
        try:
            _, found, top = look_through(logits_NV, spans, self._k)
            self._pending = (found, HostCopy((top.ids_NK, top.logprobs_NK, top.tail_N)))
        except Exception as error:
            self._failed(spans, error)

    def settle(self) -> None:
        """Bring everything captured so far into its rows."""
        if self._pending is None:
            return
        (spans, copy), self._pending = self._pending, None
        try:
            ids_PK, logprobs_PK, tail_P = copy.arrays()
            for span in spans:
                _store(span, ids_PK, logprobs_PK, tail_P)
        except Exception as error:
            self._failed(spans, error)
        else:
            self._succeeded()

    def _extended(self, span: Span) -> Span:
        """With the positions behind a rejected draft, where they are wanted."""
        if self._branches and span.verdict.tested > span.verdict.accepted:
            return replace(span, count=len(span.drafts) + 1)
        return span

    def _lose(self, spans: Sequence[Span]) -> None:
        for span in spans:
            span.row.stop_capture()
        self._counters.add(capture_failed=len(spans))

    def _failed(self, spans: Sequence[Span], error: Exception) -> None:
        self._lose(spans)
        self._last_error = error
        paused = self._breaker.is_open
        self._breaker.failed(self._clock())
        if not paused:
            pauses = self._breaker.is_open
            self._on_problem("capture, which pauses for a while," if pauses else "capture", error)

    def _succeeded(self) -> None:
        if self._breaker.is_open and self._last_error is not None:
            self._on_problem("capture, which works again, last", self._last_error)
        self._breaker.succeeded()


def _store(
    span: Span,
    ids_PK: NDArray[np.int64],
    logprobs_PK: NDArray[np.float32],
    tail_P: NDArray[np.float32],
) -> None:
    """Copy one request's part, emitted positions first, then the rejected branch."""
    row, verdict, at = span.row, span.verdict, span.output_at
    part = slice(span.first, span.first + span.count)
    ids, logprobs, tails = ids_PK[part], logprobs_PK[part], tail_P[part]
    own = len(verdict.tokens)
    row.ids_TK[at : at + own] = ids[:own]
    row.logprobs_TK[at : at + own] = logprobs[:own]
    row.tail_T[at : at + own] = tails[:own]
    if span.count > own:
        row.branches.append(
            RejectedBranch(
                start=at + verdict.accepted,
                draft_ids_N=np.array(span.drafts[verdict.accepted :], np.int32),
                ids_NK=ids[own:].astype(np.int32),
                logprobs_NK=logprobs[own:].copy(),
                tail_N=tails[own:].copy(),
            )
        )
