"""A serving node put together: model, engine, keys, log, capture, and the channel it follows."""

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from draftkeep.config import Config
from draftkeep.errors import DeniedError, DraftkeepError
from draftkeep.ingest.codec import encode_body
from draftkeep.ingest.emitter import Emitter
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.ingest.tables import RemapTable
from draftkeep.policies.keyring import Keyring
from draftkeep.policies.signing import SigningKey
from draftkeep.policies.tenant import Tenants
from draftkeep.serve.capture import Capture, DropReporter
from draftkeep.serve.engine import Engine
from draftkeep.serve.follow import ChannelFollower, scope_of
from draftkeep.serve.groups import GroupCounts
from draftkeep.serve.lookahead import Speculation
from draftkeep.serve.request import Finished
from draftkeep.serve.sealing import PublishingSealer
from draftkeep.store.anchors import GATE, ISSUER, publish_anchor, read_anchor
from draftkeep.store.catalog import Catalog
from draftkeep.store.erasure import ErasureResult, erase_subject
from draftkeep.store.models import TargetModel, load_target
from draftkeep.store.nodes import enrol_node
from draftkeep.store.registry import Registry

DRAIN_TIMEOUT_S = 10.0
# Readers refuse by the clock as well, so a deadline holds before its key is destroyed.
EXPIRY_EVERY_S = 15.0
_log = logging.getLogger(__name__)


class Node:
    """Everything behind the HTTP app. `build`, `start`, `close`; in between it serves.

    Problems of the model or the configuration refuse the start. Problems of capture (keys, log,
    catalog) leave the node serving without capture, loudly.
    """

    def __init__(
        self, config: Config, target: TargetModel, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._config = config
        self._clock = clock
        self.target = target
        self.tenants = Tenants.from_config(config)
        self.model_id = Path(target.name).name
        self.max_context = config.serve.max_context
        self.sampling_rate = config.capture.sampling_rate
        self.admin_key_sha256 = config.serve.admin_key_sha256
        self.started_s = clock()
        self.groups = GroupCounts()
        self.catalog = Catalog.open(config.state_dir / "catalog.db")
        self.registry = Registry(self.catalog, config.state_dir / "drafters")
        self._keyring: Keyring | None = None
        self._sealer: PublishingSealer | None = None
        self._next_expiry_s = 0.0
        self._sealed_log: SqliteLog | None = None
        self._emitter: Emitter | None = None
        self.capture = self._build_capture()
        self._drops = DropReporter(self.capture, self.catalog, node=config.serve.node, clock=clock)
        self.engine = Engine(
            target.model,
            slots=config.serve.slots,
            max_context=config.serve.max_context,
            queue=config.serve.queue,
            speculation=Speculation(
                mode=config.serve.speculation, lookahead=config.serve.lookahead
            ),
            capture_k=config.capture.k,
            capture_branches=config.capture.rejected_branches,
            on_finish=self._finished,
        )
        self.follower = ChannelFollower(
            self.engine,
            self.registry,
            target,
            scope=scope_of(tuple(tenant.name for tenant in config.tenants)),
            channel=config.serve.channel,
            gate_public=lambda: read_anchor(config.state_dir, GATE),
            every_s=config.serve.follow_s,
            after_poll=self._keep_house,
        )
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self.engine.run, args=(self._stop,), name="engine", daemon=True
        )

    @classmethod
    def build(cls, config: Config) -> "Node":
        """Load the target and assemble; raises what refuses a start."""
        if config.model.threads:
            torch.set_num_threads(config.model.threads)
        return cls(config, load_target(config.model.target))

    def start(self) -> None:
        """Run the engine and follow the channel."""
        self._thread.start()
        self.follower.start()

    def close(self) -> None:
        """Stop the engine, deliver what was captured, and close every file."""
        self.follower.close()
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        if self._emitter is not None:
            self._emitter.close(DRAIN_TIMEOUT_S)
        self._drops.report()
        if self._sealed_log is not None:
            self._sealed_log.close()
        if self._keyring is not None:
            self._keyring.close()
        self.catalog.close()

    @property
    def alive(self) -> bool:
        """True while the engine's thread runs."""
        return self._thread.is_alive()

    @property
    def ready(self) -> bool:
        """True while requests are taken."""
        return self.alive and not self._stop.is_set()

    def stats(self) -> dict[str, Any]:
        """Counters since start, for the administrator."""
        engine = self.engine.stats()
        state = engine.speculation
        return {
            "target": self.target.target_fingerprint,
            "drafter": engine.drafter or None,
            "speculation": {
                "mode": state.mode,
                "lookahead": state.lookahead,
                "acceptance": state.acceptance,
                "est_speedup": state.est_speedup,
                "reason": state.reason,
            },
            "engine": {
                "running": engine.running,
                "waiting": engine.waiting,
                "steps": engine.steps,
                "output_tokens": engine.output_tokens,
                "cancelled": engine.cancelled,
                "failed": engine.failed,
            },
            "groups": self.groups.snapshot(),
            "capture": {
                "acknowledged": self.capture.acknowledged,
                "drops": self.capture.drops(),
                "pending": 0 if self.capture.idle() else 1,
            },
        }

    def set_speculation(self, mode: Literal["auto", "fixed", "off"], lookahead: int | None) -> None:
        """Change the mode between two steps; `lookahead` None keeps the configured one."""
        self.engine.set_speculation(
            Speculation(mode=mode, lookahead=lookahead or self._config.serve.lookahead)
        )

    def erase(self, tenant: str, subject: str) -> ErasureResult:
        """Erase a subject everywhere this node can reach, and stop drafting with what learned
        from it. Cached keys go at the keyring's next call, by its erasure counter."""
        if self._keyring is None:
            raise DraftkeepError("the keyring is not available here; use draftkeep erase")
        if tenant not in {known.name for known in self._config.tenants}:
            raise DeniedError("that tenant is not configured")
        result = erase_subject(
            self.catalog, self._keyring, tenant=tenant, subject=subject, now_s=self._clock()
        )
        self.follower.poll()
        return result

    def _keep_house(self) -> None:
        """Report drops; forget what is past its period, destroy what is past its deadline."""
        self._drops.report()
        if self._sealer is not None:
            self._sealer.sweep()
        if self._keyring is None or self._clock() < self._next_expiry_s:
            return
        self._next_expiry_s = self._clock() + EXPIRY_EVERY_S
        try:
            self._keyring.destroy_expired(self._clock())
        except DraftkeepError as error:
            _log.error("expired keys are not destroyed yet: %s", error)

    def _finished(self, finished: Finished) -> None:
        self.groups.add(finished)
        self.capture.finished(finished)

    def _build_capture(self) -> Capture:
        emitter = None
        if self._config.capture.enabled:
            try:
                emitter = self._build_emitter()
            except (DraftkeepError, OSError) as error:
                _log.error("serving without capture: %s", error)
        self._emitter = emitter
        return Capture(
            emitter,
            context_tokens=self._config.capture.context_tokens,
            chat_template_hash=self.target.chat_template_hash,
        )

    def _build_emitter(self) -> Emitter:
        config = self._config
        self._keyring = Keyring.open(
            config.keys_path, retention=config.retention, clock=self._clock
        )
        publish_anchor(config.state_dir, ISSUER, self._keyring.issuer_public)
        name = config.serve.node
        signing = SigningKey.load_or_create(config.keys_path / f"node-{name}.key")
        enrol_node(
            self.catalog,
            name,
            signing.public,
            [tenant.name for tenant in config.tenants],
            self._clock(),
        )
        self._sealed_log = SqliteLog(
            config.state_dir / "log" / "traces",
            cap_bytes=config.log.cap_bytes,
            bucket_s=config.log.bucket_s,
            clock=self._clock,
        )
        self._sealer = PublishingSealer(
            self._keyring.node_keys(), name, signing, catalog=self.catalog, clock=self._clock
        )
        table = RemapTable.identity()
        return Emitter(
            self._sealer,
            self._sealed_log,
            encode=lambda trace: encode_body(trace, table),
            queue_traces=config.capture.queue_traces,
            on_drop=lambda reason: None,
        )


def serve(config: Config) -> None:
    """Serve until SIGTERM or SIGINT: requests under way are cancelled, captured traces delivered.

    The address is written to `serve.json` in the state directory once requests are taken.
    """
    from draftkeep.serve.runserver import run

    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    run(Node.build(config), config)


def write_address(config: Config, url: str) -> None:
    """Tell whoever waits for it where the node listens."""
    path = config.state_dir / "serve.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps({"url": url}))
    temporary.replace(path)
