"""Capture: from a finished request to a trace at the emitter, never in the way of serving."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from draftkeep.ingest.emitter import Emitter
from draftkeep.ingest.trace import Branch, DrafterRun, Provenance, TopK, Trace
from draftkeep.serve.delivery import Delivery
from draftkeep.serve.engine.request import Finished, RejectedBranch


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureTag:
    """What a captured request carries through the engine; one that is not captured has none.

    Its trace waits for `delivery`; with None it is offered as soon as the request has finished.
    """

    provenance: Provenance
    delivery: Delivery | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureStats:
    """What became of requests that could leave a trace, since start.

    `acknowledged` traces are in the log; `cut` of those sealed had branches or positions left out
    to fit into a record. `drops` are requests that left none, by reason; reasons that never
    happened are absent. `pending` requests are neither yet.
    """

    acknowledged: int
    drops: Mapping[str, int]
    pending: int
    cut: int


class Capture:
    """Makes traces of finished requests and offers them. Thread-safe; `finished` never raises.

    `emitter` None means that capture could not be set up: everything is dropped and counted as
    `unavailable`, and serving goes on. `on_problem(kind, error)` hears why a trace could not be
    built or offered.
    """

    def __init__(
        self,
        emitter: Emitter | None,
        *,
        context_tokens: int,
        chat_template_hash: bytes,
        on_problem: Callable[[str, BaseException], None],
    ) -> None:
        self._emitter = emitter
        self._context_tokens = context_tokens
        self._template = chat_template_hash
        self._on_problem = on_problem
        self._lock = threading.Lock()
        self._refused: Counter[str] = Counter()
        self._open = 0
        self._offered = 0

    @property
    def available(self) -> bool:
        """False where nothing can be captured, so that the engine need not collect."""
        return self._emitter is not None

    def refused(self, reason: str) -> None:
        """Count a request that was not captured, by the policy's reason."""
        with self._lock:
            self._refused[reason] += 1

    def admit(self, provenance: Provenance) -> CaptureTag | None:
        """The tag of a request that may be captured; None where capture is unavailable.

        Its trace is pending until the tag's delivery is settled.
        """
        if not self.available:
            self.refused("unavailable")
            return None
        with self._lock:
            self._open += 1
        return CaptureTag(
            provenance=provenance,
            delivery=Delivery(
                keep=lambda finished: self._close(self._offer, finished, provenance),
                drop=lambda reason: self._close(self.refused, reason),
            ),
        )

    def finished(self, finished: Finished) -> None:
        """Take one finished request; called in the engine's thread."""
        tag = finished.request.tag
        if not isinstance(tag, CaptureTag):
            return
        if tag.delivery is None:
            self._offer(finished, tag.provenance)
        else:
            tag.delivery.finish(finished)

    def drops(self) -> dict[str, int]:
        """How many requests left no trace, by reason; reasons that never happened are absent."""
        with self._lock:
            counts = Counter(self._refused)
        if self._emitter is not None:
            counts.update(self._emitter.counts())
        return {reason: count for reason, count in counts.items() if count}

    @property
    def acknowledged(self) -> int:
        """How many traces the log has acknowledged."""
        return 0 if self._emitter is None else self._emitter.acknowledged

    @property
    def pending(self) -> int:
        """How many captured requests are neither acknowledged nor dropped yet."""
        if self._emitter is None:
            return 0
        with self._lock:
            waiting = self._open + self._offered
        # Read after what was offered, so that a trace is never missed, only seen for too long.
        return max(0, waiting - self._emitter.acknowledged - sum(self._emitter.counts().values()))

    def stats(self) -> CaptureStats:
        """The counts at this moment."""
        return CaptureStats(
            acknowledged=self.acknowledged,
            drops=self.drops(),
            pending=self.pending,
            cut=0 if self._emitter is None else self._emitter.cut,
        )

    def _close(self, settle: Callable[..., None], *arguments: object) -> None:
        try:
            settle(*arguments)
        finally:
            with self._lock:
                self._open -= 1

    def _offer(self, finished: Finished, provenance: Provenance) -> None:
        if self._emitter is None:
            self.refused("unavailable")
            return
        try:
            trace = to_trace(
                finished, context_tokens=self._context_tokens, chat_template_hash=self._template
            )
        except Exception as error:  # a trace that cannot be built costs that trace alone
            self._on_problem("building a trace", error)
            self.refused("build_failed")
            return
        try:
            self._emitter.offer(trace, provenance)
        except Exception as error:  # it promises not to raise; a request must not depend on that
            self._on_problem("offering a trace", error)
            self.refused("emitter_failed")
            return
        with self._lock:
            self._offered += 1


def to_trace(finished: Finished, *, context_tokens: int, chat_template_hash: bytes) -> Trace:
    """The trace of a finished request, its prompt cut to the last `context_tokens`.

    The seed is left out where it does not give the noise back, because the verification rule drew
    more than one number for a token; then the processed log-probabilities are in.
    """
    request = finished.request
    prompt_ids = request.prompt_ids[-context_tokens:]
    return Trace(
        prompt_ids_P=np.asarray(prompt_ids, dtype=np.int32),
        prompt_cut=len(prompt_ids) < len(request.prompt_ids),
        output_ids_T=finished.output_ids_T,
        topk=_topk(finished.ids_TK, finished.logprobs_TK, finished.tail_T),
        how_T=finished.how_T,
        rejected_T=finished.rejected_T,
        sampling=request.sampling,
        seed=request.seed if finished.processed_T is None else None,
        choice=request.choice,
        finish=finished.finish,
        chat_template_hash=chat_template_hash,
        drafters=tuple(
            DrafterRun(drafter=use.digest, context_start=use.context_start, positions=use.positions)
            for use in finished.drafters
        ),
        branches=tuple(_branch(branch) for branch in finished.branches),
        processed_logprob_T=finished.processed_T,
    )


def _branch(branch: RejectedBranch) -> Branch:
    return Branch(
        start=branch.start,
        draft_ids_N=branch.draft_ids_N,
        topk=_topk(branch.ids_NK, branch.logprobs_NK, branch.tail_N),
    )


def _topk(ids_TK: np.ndarray, logprobs_TK: np.ndarray, tail_T: np.ndarray) -> TopK:
    positions, k = ids_TK.shape
    return TopK(
        ids_TK=ids_TK,
        logprobs_TK=logprobs_TK,
        k_T=np.full(positions, k, dtype=np.uint8),
        tail_T=tail_T,
        tail_known_T=np.full(positions, k > 0),
    )
