"""Follows a registry channel: the engine drafts with what the channel points at, once verified."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from draftkeep.errors import ConfigError, ModelError
from draftkeep.outage import Outage
from draftkeep.serve.engine.drafting import DraftModel
from draftkeep.serve.engine.engine import Engine
from draftkeep.serve.periodic import Periodic
from draftkeep.serve.problems import reason_of
from draftkeep.store.models.drafter import load_drafter
from draftkeep.store.models.target import TargetModel
from draftkeep.store.registry import Registry

# A passing lack of memory deserves another try; a drafter that always fails would cost a load and
# the requests' caches at every poll.
RELOADS = 3
_log = logging.getLogger(__name__)


class ChannelFollower:
    """Polls a channel in a thread of its own and swaps the engine's drafter.

    A drafter that does not verify is refused for good, by digest, and the running one stays. A
    channel that is cleared leaves the engine to its floor at the next poll, and so does a running
    drafter that was quarantined, whatever the channel says. A drafter that the engine lost to a
    failing pass is loaded again at the next poll, `RELOADS` times in all, and then refused. While
    the registry cannot be read the running drafter stays, and `catalog_up` is False.
    """

    def __init__(
        self,
        engine: Engine,
        registry: Registry,
        target: TargetModel,
        *,
        scope: str,
        channel: str,
        gate_public: Callable[[], bytes],
        every_s: float,
    ) -> None:
        self._engine = engine
        self._registry = registry
        self._target = target
        self._scope = scope
        self._channel = channel
        self._gate_public = gate_public
        self._refused: set[bytes] = set()
        self._losses: Counter[bytes] = Counter()
        self._stuck: bytes | None = None
        self._lock = threading.Lock()
        self._rounds = Periodic("follower", self.poll, every_s=every_s)
        # Its pauses are not waited for: whoever erased wants to know at once.
        self._outage = Outage("reading the registry")
        self.current: bytes | None = None
        self.catalog_up = True

    def start(self) -> None:
        """Poll once, so that a node that is ready already drafts, then keep polling."""
        self.poll()
        self._rounds.start()

    def stop(self) -> None:
        """Begin no further poll; the engine keeps what it has."""
        self._rounds.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of a poll under way; False where it goes on after `timeout_s`."""
        return self._rounds.join(timeout_s)

    def poll(self) -> None:
        """Read the channel and swap if it moved. Never raises."""
        with self._lock:
            self._notice_loss()
            try:
                digest = self._registry.channel(self._scope, self._channel)
                current = self.current
                sound = current is None or self._registry.status(current) == "registered"
            except Exception as error:
                self.catalog_up = False
                reason = f"{reason_of(error)}. The running drafter stays"
                self._outage.failed(reason, time.monotonic())
                return
            self.catalog_up = True
            self._outage.worked(time.monotonic())
            if digest == current or (digest is not None and self._take(digest)):
                self.current = digest
            elif digest is None or not sound:
                self._engine.swap(None)
                self.current = None
                _log.info("no drafter to follow; the node's floor drafts, where it has one")

    def _notice_loss(self) -> None:
        lost = self.current
        if lost is None or self._engine.stats().drafter_lost != lost:
            return
        self.current = None
        self._losses[lost] += 1
        if self._losses[lost] > RELOADS:
            self._refused.add(lost)
            _log.error(
                "drafter %s refused: its passes failed after every one of %d loads; point the "
                "channel at another",
                lost.hex()[:12],
                RELOADS + 1,
            )
        else:
            _log.warning(
                "drafter %s was lost to a failing pass; loading it again, %d of %d",
                lost.hex()[:12],
                self._losses[lost],
                RELOADS,
            )

    def _take(self, digest: bytes) -> bool:
        """Load, verify and swap; False where this drafter cannot be used, or not yet."""
        if digest in self._refused:
            return False
        try:
            self._engine.swap(
                load_draft_model(
                    self._registry.path(digest), self._target, gate_public=self._gate_public()
                )
            )
        except ModelError as error:
            self._refused.add(digest)
            _log.error("drafter %s refused: %s", digest.hex()[:12], error)
            return False
        except Exception as error:
            # A file or a key that is not there yet, or no memory: the next poll tries again.
            if digest != self._stuck:
                reason = str(error) if isinstance(error, ConfigError) else type(error).__name__
                _log.error("drafter %s not loaded yet: %s", digest.hex()[:12], reason)
            self._stuck = digest
            return False
        self._stuck = None
        _log.info("drafting with %s", digest.hex()[:12])
        return True


def load_draft_model(
    directory: Path, target: TargetModel, *, gate_public: bytes | None
) -> DraftModel:
    """A saved drafter as the engine takes it, verified, on the target's device and in its dtype.

    It shares the target's embeddings where their values agree. `gate_public` None leaves the
    signature unchecked. Raises what `load_drafter` raises, and ModelError for a drafter of another
    target.
    """
    embedding_VC = target.model.get_input_embeddings().weight
    drafter = load_drafter(
        directory,
        gate_public=gate_public,
        expect_tokenizer=target.tokenizer_fingerprint,
        expect_vocab=target.vocab,
        share_embeddings=embedding_VC,
        device=embedding_VC.device,
        dtype=embedding_VC.dtype,
    )
    if drafter.manifest.target != target.target_fingerprint.hex():
        raise ModelError(
            f"it was made for target {drafter.manifest.target[:12]}, this node serves "
            f"{target.target_fingerprint.hex()[:12]}; train one for this target"
        )
    return DraftModel(model=drafter.model, vocab_ids=drafter.vocab_ids, digest=drafter.digest)
