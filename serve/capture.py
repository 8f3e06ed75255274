"""Capture: from a finished request to a trace at the emitter, never in the way of serving."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from draftkeep.ingest.emitter import Emitter
from draftkeep.ingest.trace import Provenance
from draftkeep.serve.delivery import Delivery
from draftkeep.serve.engine.request import Finished
from draftkeep.serve.to_trace import to_trace


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureStats:
    """What became of requests, since start.

    `declined` ones were not to be captured: whoever asked, the tenant, the configuration or the
    sampling rate said no. Of the others `acknowledged` traces are in the log, `drops` were lost
    and `pending` are neither yet. `declined` and `drops` are by reason; reasons that never
    happened are absent. `cut` of those sealed had branches or positions left out to fit into a
    record.
    """

    acknowledged: int
    declined: Mapping[str, int]
    drops: Mapping[str, int]
    pending: int
    cut: int


class Capture:
    """Makes traces of finished requests and offers them. Thread-safe; `finished` never raises.

    `emitter` None means that capture could not be set up: what is admitted is dropped as
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
        self._declined: Counter[str] = Counter()
        self._dropped: Counter[str] = Counter()
        self._open = 0
        self._offered = 0

    def decline(self, reason: str) -> None:
        """Count a request that is not to be captured, by the policy's reason."""
        with self._lock:
            self._declined[reason] += 1

    def admit(self, provenance: Provenance) -> Delivery | None:
        """What a request that may be captured carries as its tag; None where capture is
        unavailable, so that the engine need not collect.

        Its trace is pending until the delivery is settled.
        """
        emitter = self._emitter
        if emitter is None:
            self._drop("unavailable")
            return None
        with self._lock:
            self._open += 1
        return Delivery(
            keep=lambda finished: self._close(self._offer, emitter, finished, provenance),
            drop=lambda reason: self._close(self._drop, reason),
        )

    def finished(self, finished: Finished) -> None:
        """Take one finished request; called in the engine's thread."""
        delivery = finished.request.tag
        if isinstance(delivery, Delivery):
            delivery.finish(finished)

    def expired(self, traces: int) -> None:
        """Count traces whose deadline passed before anybody had read them from the log."""
        with self._lock:
            self._dropped["log_expired"] += traces

    def drops(self) -> dict[str, int]:
        """How many traces were lost, by reason; reasons that never happened are absent."""
        with self._lock:
            counts = Counter(self._dropped)
        if self._emitter is not None:
            counts.update(self._emitter.counts())
        return {reason: count for reason, count in counts.items() if count}

    @property
    def acknowledged(self) -> int:
        """How many traces the log has acknowledged."""
        return 0 if self._emitter is None else self._emitter.acknowledged

    @property
    def pending(self) -> int:
        """How many admitted requests are neither acknowledged nor dropped yet."""
        if self._emitter is None:
            return 0
        with self._lock:
            waiting = self._open + self._offered
        # Read after what was offered, so that a trace is never missed, only seen for too long.
        return max(0, waiting - self._emitter.acknowledged - sum(self._emitter.counts().values()))

    def stats(self) -> CaptureStats:
        """The counts at this moment."""
        with self._lock:
            declined = dict(self._declined)
        return CaptureStats(
            acknowledged=self.acknowledged,
            declined=declined,
            drops=self.drops(),
            pending=self.pending,
            cut=0 if self._emitter is None else self._emitter.cut,
        )

    def _drop(self, reason: str) -> None:
        with self._lock:
            self._dropped[reason] += 1

    def _close(self, settle: Callable[..., None], *arguments: object) -> None:
        try:
            settle(*arguments)
        finally:
            with self._lock:
                self._open -= 1

    def _offer(self, emitter: Emitter, finished: Finished, provenance: Provenance) -> None:
        try:
            trace = to_trace(
                finished, context_tokens=self._context_tokens, chat_template_hash=self._template
            )
        except Exception as error:  # a trace that cannot be built costs that trace alone
            self._on_problem("building a trace", error)
            self._drop("build_failed")
            return
        try:
            emitter.offer(trace, provenance)
        except Exception as error:  # it promises not to raise; a request must not depend on that
            self._on_problem("offering a trace", error)
            self._drop("emitter_failed")
            return
        with self._lock:
            self._offered += 1
