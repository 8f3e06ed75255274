"""A serving node put together: model, engine, keys, outbox, capture, and the channel it follows."""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from draftkeep.config import Config
from draftkeep.errors import DraftkeepError, InputError, UnavailableError
from draftkeep.policies.keyring import Keyring
from draftkeep.policies.tenant import Tenants
from draftkeep.serve.capture import Capture, DropReporter
from draftkeep.serve.engine.engine import Engine
from draftkeep.serve.engine.lookahead import Speculation
from draftkeep.serve.engine.ngram import NGRAM_DIGEST, NgramDrafter
from draftkeep.serve.engine.request import Finished, StepReport
from draftkeep.serve.exposition import Exposition
from draftkeep.serve.follow import ChannelFollower
from draftkeep.serve.groups import GroupCounts
from draftkeep.serve.http.request_log import RequestLog
from draftkeep.serve.limits import Limits
from draftkeep.serve.metrics import Metrics
from draftkeep.serve.outbox import Outbox
from draftkeep.serve.problems import ProblemLog
from draftkeep.serve.sealing import publish_periods
from draftkeep.store.anchors import GATE, read_anchor
from draftkeep.store.catalog import Catalog
from draftkeep.store.erasure import ErasureResult, erase_subject
from draftkeep.store.models import TargetModel, load_target
from draftkeep.store.registry import Registry, scope_of

DRAIN_TIMEOUT_S = 10.0
# Readers refuse by the clock as well, so a deadline holds before its key is destroyed.
EXPIRY_EVERY_S = 15.0
_log = logging.getLogger(__name__)


class Node:
    """Everything behind the HTTP app. `build`, `start`, `close`; in between it serves.

    Problems of the model, the catalog or the configuration refuse the start. Problems of capture
    (keys, log, enrolment) leave the node serving without capture: logged, and counted as drops.
    """

    def __init__(
        self, config: Config, target: TargetModel, *, clock: Callable[[], float] = time.time
    ) -> None:
        self._config = config
        self.now_s = clock
        self.target = target
        self.tenants = Tenants.from_config(config)
        # Never a path: it is shown to every caller.
        self.model_id = os.path.basename(os.path.abspath(target.name))
        self.max_context = config.serve.max_context
        self.sampling_rate = config.capture.sampling_rate
        self.admin_key_sha256 = config.serve.admin_key_sha256
        self.open_metrics = config.serve.open_metrics
        self.release = config.serve.release
        self.release_tick_s = config.serve.release_tick_s
        self.started_s = clock()
        self.groups = GroupCounts()
        self.limits = Limits(
            {tenant.name: tenant.limits for tenant in config.tenants}, clock=time.monotonic
        )
        self.metrics = _metrics(config)
        self.requests = RequestLog(label=self.metrics.label)
        self.exposition = Exposition(
            self.metrics, self.stats, model_name=self.model_id, cache=_cache_shape(config)
        )
        self._problems = ProblemLog()
        self.engine = _engine(
            config,
            target,
            on_finish=self._finished,
            on_problem=self._problems.problem,
            on_step=self.metrics.step,
        )
        self.catalog = Catalog.open(config.state_dir / "catalog.db")
        self.registry = Registry(self.catalog, config.state_dir / "drafters")
        self._keyring = self._open_keyring()
        self._publish_periods()
        self._outbox = self._build_outbox()
        self.capture = Capture(
            self._outbox.emitter if self._outbox is not None else None,
            context_tokens=config.capture.context_tokens,
            chat_template_hash=target.chat_template_hash,
            on_problem=self._problems.problem,
        )
        self._drops = DropReporter(self.capture, self.catalog, node=config.serve.node, clock=clock)
        self._next_expiry_s = 0.0
        self.follower = self._build_follower()
        self._stop = threading.Event()
        self._draining = False
        self._thread = threading.Thread(target=self._run_engine, name="engine", daemon=True)

    @classmethod
    def build(cls, config: Config) -> "Node":
        """Load the target and assemble; raises what refuses a start."""
        if config.model.threads:
            torch.set_num_threads(config.model.threads)
        model = config.model
        return cls(config, load_target(model.target, device=model.device, dtype=model.dtype))

    def start(self) -> None:
        """Run the engine and follow the channel."""
        self._thread.start()
        self.follower.start()

    def drain(self) -> None:
        """Take no more requests; those under way go on."""
        self._draining = True

    def close(self) -> None:
        """Stop the engine, deliver what was captured, and close every file.

        A log that hangs holds this up for `DRAIN_TIMEOUT_S` at most; what it did not take by then
        is counted as dropped.
        """
        self.follower.close()
        self._stop.set()
        self.engine.wake()
        if self._thread.is_alive():
            self._thread.join()
        if self._outbox is not None:
            self._outbox.close(DRAIN_TIMEOUT_S)
        self._drops.report()
        if self._keyring is not None:
            self._keyring.close()
        self.catalog.close()
        self.requests.flush()

    @property
    def alive(self) -> bool:
        """True while the engine's thread runs."""
        return self._thread.is_alive()

    @property
    def ready(self) -> bool:
        """True while requests are taken."""
        return self.alive and not self._draining and not self._stop.is_set()

    def stats(self) -> dict[str, Any]:
        """Counters since start, for the administrator."""
        engine = asdict(self.engine.stats())
        return {
            "target": self.target.target_fingerprint,
            "drafter": engine.pop("drafter") or None,
            "speculation": engine.pop("speculation"),
            "engine": engine,
            "groups": self.groups.snapshot(),
            "tenants": self.limits.usage(),
            "capture": {
                "acknowledged": self.capture.acknowledged,
                "drops": self.capture.drops(),
                "pending": self.capture.pending,
                "cut": self.capture.cut,
            },
        }

    def set_speculation(self, mode: Literal["auto", "fixed", "off"], lookahead: int | None) -> int:
        """Change the mode between two steps; returns the lookahead, the configured one for None."""
        chosen = lookahead or self._config.serve.lookahead
        self.engine.set_speculation(Speculation(mode=mode, lookahead=chosen))
        return chosen

    def erase(self, tenant: str, subject: str) -> ErasureResult:
        """Erase a subject everywhere this node can reach, and stop drafting with what learned
        from it.

        Cached keys go at the keyring's next call, by its erasure counter. Requests under way and
        traces that wait are never sealed. A subject nobody has seen gives a result of zeros.
        """
        if tenant not in {known.name for known in self._config.tenants}:
            raise InputError("that tenant is not configured on this node", param="tenant")
        if self._keyring is None:
            raise UnavailableError(
                "the keyring cannot be used here, see the node's log; use draftkeep erase"
            )
        if self._outbox is not None:
            self._outbox.sealer.forget(tenant, subject)
        try:
            return erase_subject(
                self.catalog, self._keyring, tenant=tenant, subject=subject, now_s=self.now_s()
            )
        finally:
            # The plan may be committed even where a later step failed.
            self.follower.poll()

    def _run_engine(self) -> None:
        try:
            self.engine.run(self._stop)
        except Exception as error:
            _log.critical("the engine died with %s; restart the node", type(error).__name__)
            # Whoever waits is told, and nobody is taken on.
            self._stop.set()
            self.engine.close()

    def _keep_house(self) -> None:
        """Report drops; forget what is past its period, destroy what is past its deadline."""
        self._drops.report()
        if self._outbox is not None:
            self._outbox.sealer.sweep()
        if self._keyring is None or self.now_s() < self._next_expiry_s:
            return
        self._next_expiry_s = self.now_s() + EXPIRY_EVERY_S
        try:
            self._keyring.destroy_expired(self.now_s())
        except DraftkeepError as error:
            _log.error("expired keys are not destroyed yet: %s", error)

    def _finished(self, finished: Finished) -> None:
        """Tell everyone; a counter that fails must not cost a trace."""
        observers: tuple[tuple[str, Callable[[Finished], None]], ...] = (
            ("counting a group", self.groups.add),
            ("a metric", self.metrics.finished),
            ("the request log", self.requests.finished),
            ("capture", self.capture.finished),
        )
        for kind, observe in observers:
            try:
                observe(finished)
            except Exception as error:
                self._problems.problem(kind, error)

    def _open_keyring(self) -> Keyring | None:
        """None where it cannot be used. Erasure and deadlines need it without capture, too."""
        try:
            return Keyring.open(
                self._config.keys_path, retention=self._config.retention, clock=self.now_s
            )
        except Exception as error:
            _log.error("serving without a keyring, so without capture: %s", _reason(error))
            return None

    def _publish_periods(self) -> None:
        """A shorter ttl must reach readers that hold no key, with capture or without."""
        if self._keyring is None:
            return
        try:
            publish_periods(self.catalog, self._keyring)
        except Exception as error:
            _log.error("the catalog's deadlines are not up to date: %s", _reason(error))

    def _build_follower(self) -> ChannelFollower:
        config = self._config
        return ChannelFollower(
            self.engine,
            self.registry,
            self.target,
            scope=scope_of([tenant.name for tenant in config.tenants]),
            channel=config.serve.channel,
            gate_public=lambda: read_anchor(config.state_dir, GATE),
            every_s=config.serve.follow_s,
            after_poll=self._keep_house,
        )

    def _build_outbox(self) -> Outbox | None:
        if not self._config.capture.enabled or self._keyring is None:
            return None
        try:
            return Outbox.build(
                self._config,
                keyring=self._keyring,
                catalog=self.catalog,
                clock=self.now_s,
                on_drop=self._problems.drop,
            )
        except Exception as error:
            _log.error("serving without capture: %s", _reason(error))
            return None


def _engine(
    config: Config,
    target: TargetModel,
    *,
    on_finish: Callable[[Finished], None],
    on_problem: Callable[[str, BaseException], None],
    on_step: Callable[[StepReport], None],
) -> Engine:
    return Engine(
        target.model,
        slots=config.serve.slots,
        max_context=config.serve.max_context,
        queue=config.serve.queue,
        speculation=Speculation(mode=config.serve.speculation, lookahead=config.serve.lookahead),
        capture_k=config.capture.k,
        capture_branches=config.capture.rejected_branches,
        verification=config.serve.verification,
        floor=NgramDrafter() if config.serve.floor == "ngram" else None,
        preempt_after_s=config.serve.preempt_after_s,
        on_finish=on_finish,
        on_problem=on_problem,
        on_step=on_step,
    )


def _cache_shape(config: Config) -> dict[str, str]:
    return {
        "block_size": str(config.serve.max_context),
        "cache_dtype": config.model.dtype,
        "num_gpu_blocks": str(config.serve.slots),
    }


def _metrics(config: Config) -> Metrics:
    shown = [tenant for tenant in config.tenants if not tenant.hide_domain]
    return Metrics(
        domains={domain for tenant in shown for domain in tenant.domains},
        names={NGRAM_DIGEST: "ngram"},
        max_context=config.serve.max_context,
        lookahead=config.serve.lookahead,
    )


def _reason(error: Exception) -> str:
    """Only errors raised on purpose are known to say nothing they should not."""
    if isinstance(error, DraftkeepError):
        return str(error)
    if isinstance(error, OSError):
        return f"{type(error).__name__}: {error.strerror} ({Path(error.filename or '').name})"
    return type(error).__name__
