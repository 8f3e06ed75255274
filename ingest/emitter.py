"""Emitter: what a serving node hands its traces to. It may lose a trace; it never harms a request.

`offer` puts a trace into a bounded queue and returns. One thread encodes, seals and appends; what
it cannot deliver is dropped, and every drop is counted by its reason.
"""

import contextlib
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from draftkeep.breaker import Breaker
from draftkeep.errors import DeniedError, KeyDestroyedError, LogFullError
from draftkeep.ingest.envelope import Sealer
from draftkeep.ingest.fit import fit_body
from draftkeep.ingest.log import Log
from draftkeep.ingest.record import MAX_RECORD_BYTES, RECORD_OVERHEAD_BYTES, encode_record
from draftkeep.ingest.trace import Provenance, Trace

_GROUP_TRACES = 64
_HEADER_BYTES = 4096  # more than any header; domain labels are an operator's
MAX_BODY_BYTES = MAX_RECORD_BYTES - RECORD_OVERHEAD_BYTES - _HEADER_BYTES


class Drop(StrEnum):
    """Why a trace was not delivered."""

    QUEUE_FULL = "queue_full"
    BREAKER_OPEN = "breaker_open"
    CLOSED = "closed"
    NO_KEY = "no_key"
    SEAL_FAILED = "seal_failed"
    TOO_LARGE = "too_large"
    LOG_FULL = "log_full"
    LOG_FAILED = "log_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sealed:
    trace_id: bytes
    record: bytes


class Emitter:
    """The queue between serving and the log. Every method may be called from any thread.

    Holds at most `queue_traces` waiting traces and one group under way. `on_drop(reason)` runs in
    the thread that lost the trace, the caller's for a refused offer, so it must be quick;
    `on_ack(trace_id)` runs in the emitter's thread after the append returned. What either raises
    is ignored. The emitter owns its thread; sealer and log stay the caller's to close.
    """

    def __init__(
        self,
        sealer: Sealer,
        log: Log,
        *,
        encode: Callable[[Trace], bytes],
        queue_traces: int,
        on_drop: Callable[[str], None],
        on_ack: Callable[[bytes], None] | None = None,
        breaker: Breaker | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sealer = sealer
        self._log = log
        self._encode = encode
        self._queue_traces = queue_traces
        self._on_drop = on_drop
        self._on_ack = on_ack
        self._breaker = breaker if breaker is not None else Breaker()
        self._clock = clock
        self._changed = threading.Condition()
        self._queue: deque[tuple[Trace, Provenance]] = deque()
        self._drops: Counter[str] = Counter({reason.value: 0 for reason in Drop})
        self._acknowledged = 0
        self._cut = 0
        self._working = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="emitter", daemon=True)
        self._thread.start()

    def offer(self, trace: Trace, provenance: Provenance) -> bool:
        """Queue a trace. Returns at once and never raises; False where it was dropped."""
        with self._changed:
            refusal = self._refusal()
            if refusal is None:
                self._queue.append((trace, provenance))
                self._changed.notify_all()
        if refusal is not None:
            self._drop(refusal)
        return refusal is None

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything offered so far was delivered or dropped; False on time-out."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._queue and not self._working, timeout_s)

    def close(self, timeout_s: float) -> None:
        """Refuse further offers, deliver what waits, and drop what is left after `timeout_s`.

        A group that a slow log still holds then may yet be acknowledged.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        with self._changed:
            left = len(self._queue)
            self._queue.clear()
        for _ in range(left):
            self._drop(Drop.CLOSED)

    def counts(self) -> dict[str, int]:
        """How many traces were dropped, by reason; every reason is present."""
        with self._changed:
            return dict(self._drops)

    @property
    def acknowledged(self) -> int:
        """How many traces the log has acknowledged."""
        with self._changed:
            return self._acknowledged

    @property
    def cut(self) -> int:
        """How many sealed traces had branches or positions left out to fit into a record."""
        with self._changed:
            return self._cut

    def _refusal(self) -> Drop | None:
        if self._closing:
            return Drop.CLOSED
        if self._breaker.wait_s(self._clock()) > 0:
            return Drop.BREAKER_OPEN
        return Drop.QUEUE_FULL if len(self._queue) >= self._queue_traces else None

    def _run(self) -> None:
        while group := self._take():
            self._deliver([sealed for item in group if (sealed := self._seal(*item)) is not None])
            with self._changed:
                self._working = False
                self._changed.notify_all()

    def _take(self) -> list[tuple[Trace, Provenance]]:
        """The next group, when the breaker allows one; empty when there will be no more."""
        with self._changed:
            while not (self._queue and (self._closing or self._pause_s() == 0)):
                if self._closing:
                    return []
                self._changed.wait(self._pause_s() or None)
            size = 1 if self._breaker.doubtful else _GROUP_TRACES
            group = [self._queue.popleft() for _ in range(min(size, len(self._queue)))]
            self._working = True
            return group

    def _pause_s(self) -> float:
        return self._breaker.wait_s(self._clock())

    def _seal(self, trace: Trace, provenance: Provenance) -> _Sealed | None:
        """Encode and seal one trace, or drop it; a trace that fails must not end the thread."""
        try:
            trace = replace(trace, held_out=self._sealer.held_out(provenance))
            fitted = fit_body(trace, self._encode, MAX_BODY_BYTES)
            if fitted is None:
                self._drop(Drop.TOO_LARGE)
                return None
            sealed = self._sealer.seal(
                fitted.body,
                provenance,
                prompt_tokens=len(fitted.trace.prompt_ids_P),
                positions=fitted.trace.positions,
            )
            result = _Sealed(trace_id=sealed.parsed.trace_id, record=encode_record(sealed))
        except (KeyDestroyedError, DeniedError):
            self._drop(Drop.NO_KEY)
            return None
        except Exception:
            self._failed([Drop.SEAL_FAILED])
            return None
        with self._changed:
            self._cut += fitted.cut
        return result

    def _deliver(self, group: Sequence[_Sealed]) -> None:
        if not group:
            return
        try:
            self._log.append([sealed.record for sealed in group])
        except LogFullError:
            self._failed([Drop.LOG_FULL] * len(group))
        except Exception:
            self._failed([Drop.LOG_FAILED] * len(group))
        else:
            self._succeeded(group)

    def _succeeded(self, group: Sequence[_Sealed]) -> None:
        with self._changed:
            self._breaker.succeeded()
            self._acknowledged += len(group)
        if self._on_ack is not None:
            for sealed in group:
                with contextlib.suppress(Exception):
                    self._on_ack(sealed.trace_id)

    def _failed(self, drops: Sequence[Drop]) -> None:
        with self._changed:
            self._breaker.failed(self._clock())
        for reason in drops:
            self._drop(reason)

    def _drop(self, reason: Drop) -> None:
        with self._changed:
            self._drops[reason.value] += 1
        with contextlib.suppress(Exception):
            self._on_drop(reason.value)
