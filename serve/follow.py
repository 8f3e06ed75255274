"""Follows a registry channel: the engine drafts with what the channel points at, once verified."""

import logging
import threading
from collections.abc import Callable

from draftkeep.errors import DraftkeepError, ModelError
from draftkeep.serve.drafting import DraftModel
from draftkeep.serve.engine import Engine
from draftkeep.store.drafter import load_drafter
from draftkeep.store.models import TargetModel
from draftkeep.store.registry import EVERYONE, Registry

_log = logging.getLogger(__name__)


def scope_of(tenants: tuple[str, ...]) -> str:
    """Whose channel a node follows: its tenant's where it serves one, else everyone's.

    A drafter that learned from one tenant must never draft for another.
    """
    return f"tenant:{tenants[0]}" if len(tenants) == 1 else EVERYONE


class ChannelFollower:
    """Polls a channel in a thread of its own and swaps the engine's drafter.

    A drafter that does not verify is refused once, by digest, and the running one stays. A channel
    that is cleared, or whose drafter was quarantined, ends drafting at the next poll. While the
    registry cannot be read the running drafter stays.
    """

    def __init__(
        self,
        engine: Engine,
        registry: Registry,
        target: TargetModel,
        *,
        scope: str,
        channel: str,
        gate_public: Callable[[], bytes | None],
        every_s: float,
        after_poll: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._registry = registry
        self._target = target
        self._scope = scope
        self._channel = channel
        self._gate_public = gate_public
        self._every_s = every_s
        self._after_poll = after_poll
        self._refused: set[bytes] = set()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="follower", daemon=True)
        self.current: bytes | None = None

    def start(self) -> None:
        """Poll once, so that a node that is ready already drafts, then keep polling."""
        self.poll()
        self._thread.start()

    def close(self) -> None:
        """Stop polling; the engine keeps what it has."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def poll(self) -> None:
        """Read the channel and swap if it moved. Never raises."""
        with self._lock:
            try:
                digest = self._registry.channel(self._scope, self._channel)
            except Exception:
                _log.warning("the registry cannot be read; the running drafter stays")
                return
            if digest == self.current or digest in self._refused:
                return
            if digest is None:
                self._engine.swap(None)
                _log.info("drafting with nothing")
            elif not self._take(digest):
                return
            self.current = digest

    def _take(self, digest: bytes) -> bool:
        try:
            self._engine.swap(self._load(digest))
        except (DraftkeepError, OSError) as error:
            self._refused.add(digest)
            _log.error("drafter %s refused: %s", digest.hex()[:12], error)
            return False
        _log.info("drafting with %s", digest.hex()[:12])
        return True

    def _load(self, digest: bytes) -> DraftModel:
        gate_public = self._gate_public()
        if gate_public is None:
            raise ModelError("no gate key is known here, so no drafter can be verified")
        drafter = load_drafter(
            self._registry.path(digest),
            gate_public=gate_public,
            expect_tokenizer=self._target.tokenizer_fingerprint,
            expect_vocab=self._target.vocab,
            share_embeddings=self._target.model.get_input_embeddings().weight,
        )
        return DraftModel(model=drafter.model, vocab_ids=drafter.vocab_ids, digest=drafter.digest)

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self.poll()
            self._after_poll()
