"""A serving node put together: model, engine, keys, outbox, capture, and the channel it follows."""

import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack

import torch

from draftkeep.config import Config
from draftkeep.errors import InputError, PermanentError, StoreError, UnavailableError
from draftkeep.policies.signing import SigningKey
from draftkeep.policies.tenant import Tenants
from draftkeep.serve.assembly import (
    cache_shape,
    make_engine,
    make_follower,
    make_metrics,
    open_catalog,
    open_keyring,
    open_outbox,
)
from draftkeep.serve.capture import Capture
from draftkeep.serve.drops import DropReporter
from draftkeep.serve.engine.lookahead import Mode, Speculation
from draftkeep.serve.engine.request import Finished
from draftkeep.serve.engine_thread import EngineThread
from draftkeep.serve.errands import Errands
from draftkeep.serve.exposition import Exposition
from draftkeep.serve.follow import ChannelFollower
from draftkeep.serve.groups import GroupCounts
from draftkeep.serve.housekeeping import Housekeeper
from draftkeep.serve.key_deadlines import KeyDeadlines
from draftkeep.serve.limits import Limits
from draftkeep.serve.outbox import Outbox
from draftkeep.serve.problems import ProblemLog
from draftkeep.serve.request_log import RequestLog
from draftkeep.serve.stats import NodeStats
from draftkeep.store.catalog import Catalog
from draftkeep.store.erasure import ErasureResult, erase_subject
from draftkeep.store.models.target import TargetModel, load_target
from draftkeep.store.registry import Registry

# What a step, a poll and a round of housekeeping under way have to end, together.
END_TIMEOUT_S = 5.0
DRAIN_TIMEOUT_S = 10.0
# Readers refuse by the clock as well, so a deadline holds before its key is destroyed.
KEEP_HOUSE_S = 5.0
_HOUSEKEEPING = "housekeeping"
_log = logging.getLogger(__name__)

_Opened = tuple[Catalog, SigningKey | None]
# How often an attempt at the catalog is made: returns what the one that went well did.
Patience = Callable[[Callable[[], _Opened]], _Opened]


def _once(attempt: Callable[[], _Opened]) -> _Opened:
    return attempt()


class Node:
    """Everything behind the HTTP app. `build`, `start`, `close`; in between it serves.

    Problems of the model, the catalog or the configuration refuse the start. Problems of capture
    (keys, log, enrolment) leave the node serving without capture: logged, and counted as drops.
    """

    def __init__(
        self,
        config: Config,
        target: TargetModel,
        *,
        patience: Patience = _once,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self.now_s = clock
        self.target = target
        self.tenants = Tenants.from_config(config)
        # Never a path: it is shown to every caller.
        self.model_id = os.path.basename(os.path.abspath(target.name))
        self._clock = clock
        self._ttl_s = config.retention.ttl_s
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
        self.metrics = make_metrics(config)
        self.requests = RequestLog(label=self.metrics.label)
        self.exposition = Exposition(
            self.metrics, self.stats, model_name=self.model_id, cache=cache_shape(config)
        )
        self._problems = ProblemLog()
        self.engine = make_engine(
            config,
            target,
            on_finish=self._finished,
            on_problem=self._problems.problem,
            on_step=self.metrics.step,
        )
        self._keyring = open_keyring(config, clock=clock)
        self._outbox: Outbox | None = None
        self._deadlines = self._keep_deadlines()
        self.catalog, self._outbox = self._open(patience)
        self.registry = Registry(self.catalog, config.state_dir / "drafters")
        self.capture = Capture(
            self._outbox.emitter if self._outbox is not None else None,
            context_tokens=config.capture.context_tokens,
            chat_template_hash=target.chat_template_hash,
            on_problem=self._problems.problem,
        )
        self.engine_thread = EngineThread(self.engine, stall_s=config.serve.stall_s)
        self.errands = Errands()
        self._drops = DropReporter(self.capture, self.catalog, node=config.serve.node, clock=clock)
        self.housekeeper = self._make_housekeeper()
        self.follower = make_follower(config, self.engine, self.registry, target)
        self._draining = False

    @classmethod
    def build(cls, config: Config, *, patience: Patience = _once) -> "Node":
        """Load the target, open the catalog and assemble; raises what refuses a start."""
        if config.model.threads:
            torch.set_num_threads(config.model.threads)
        model = config.model
        target = load_target(model.target, device=model.device, dtype=model.dtype)
        return cls(config, target, patience=patience)

    def start(self) -> None:
        """Run the engine, keep house and follow the channel."""
        # Readers learn of shorter deadlines before anything more is captured.
        self.housekeeper.keep()
        self.engine_thread.start()
        self.housekeeper.start()
        if self._outbox is not None:
            self._outbox.start()
        self.follower.start()

    def drain(self) -> None:
        """Take no more requests; those under way go on."""
        self._draining = True

    def close(self) -> None:
        """Stop the engine, deliver what was captured, and close every file.

        A log that hangs holds this up for `DRAIN_TIMEOUT_S` at most; what it did not take by then
        is counted as dropped. A catalog does for `END_TIMEOUT_S`; drops that it did not take by
        then are logged. A part that is still at work after `END_TIMEOUT_S` keeps keyring,
        catalog and log open under it; they are left to the end of the process then. What had been
        captured is delivered all the same.
        """
        at_work = self._end()
        self.requests.flush()
        if at_work:
            self._leave_open(at_work)
            return
        if self._outbox is not None:
            self._outbox.close(DRAIN_TIMEOUT_S)
        reported = self._drops.report_last(END_TIMEOUT_S)
        self._close_keys()
        if reported:
            self.catalog.close()

    @property
    def alive(self) -> bool:
        """True while the engine's loop runs and comes round."""
        return self.engine_thread.alive

    @property
    def ready(self) -> bool:
        """True while requests are taken."""
        return self.alive and not self._draining and not self.engine_thread.stopping

    def stats(self) -> NodeStats:
        """Counters since start, for the administrator and the metrics."""
        return NodeStats(
            target=self.target.target_fingerprint,
            engine=self.engine.stats(),
            groups=self.groups.snapshot(),
            tenants=self.limits.usage(),
            capture=self.capture.stats(),
            catalog_up=self.follower.catalog_up,
            forwarding=None if self._outbox is None else self._outbox.stats(),
        )

    def set_speculation(self, mode: Mode, lookahead: int | None) -> int:
        """Change the mode between two steps; returns the lookahead, the configured one for None."""
        chosen = lookahead or self._config.serve.lookahead
        self.engine.set_speculation(Speculation(mode=mode, lookahead=chosen))
        return chosen

    def erase(self, tenant: str, subject: str) -> ErasureResult:
        """Erase a subject everywhere this node can reach, and stop drafting with what learned
        from it.

        Cached keys go at the keyring's next call, by its erasure counter. Requests under way and
        traces that wait are never sealed. A subject nobody has seen gives a result of zeros.
        UnavailableError, which says whether anything was erased, where the catalog is away.
        """
        if tenant not in {known.name for known in self._config.tenants}:
            raise InputError("that tenant is not configured on this node", param="tenant")
        if self._keyring is None:
            raise UnavailableError(
                "the keyring cannot be used here, see the node's log; use draftkeep erase"
            )
        try:
            self.catalog.reach()
        except StoreError as error:
            raise UnavailableError(f"{error}. Nothing was erased: ask again") from None
        if self._outbox is not None:
            self._outbox.sealer.forget(tenant, subject)
        try:
            return erase_subject(
                self.catalog, self._keyring, tenant=tenant, subject=subject, now_s=self.now_s()
            )
        except PermanentError:
            raise
        except StoreError as error:
            raise UnavailableError(
                f"{error}. The erasure may have begun: ask again to finish it"
            ) from None
        finally:
            # The plan may be committed even where a later step failed.
            self.follower.poll()

    def _keep_deadlines(self) -> KeyDeadlines | None:
        """Begun before anything is waited for: a deadline waits for nobody."""
        if self._keyring is None:
            return None
        deadlines = KeyDeadlines(
            self._keyring, forget=self._forget, clock=self._clock, every_s=KEEP_HOUSE_S
        )
        deadlines.start()
        return deadlines

    def _forget(self) -> None:
        """What the sealer remembers of periods that are over; there is none before the catalog."""
        if self._outbox is not None:
            self._outbox.sealer.sweep()

    def _open(self, patience: Patience) -> tuple[Catalog, Outbox | None]:
        """The catalog, and the way of the traces. Closes the keyring where that is refused."""
        config, keyring, clock = self._config, self._keyring, self._clock
        with ExitStack() as undo:
            undo.callback(self._close_keys)
            catalog, signing = patience(lambda: open_catalog(config, keyring, clock=clock))
            undo.callback(catalog.close)
            outbox = open_outbox(
                config, keyring, signing, catalog, clock=clock, on_drop=self._problems.drop
            )
            undo.pop_all()
        return catalog, outbox

    def _close_keys(self) -> None:
        """Leaves the keyring open under a round that does not end."""
        if self._deadlines is not None:
            self._deadlines.stop()
            if not self._deadlines.join(END_TIMEOUT_S):
                return
        if self._keyring is not None:
            self._keyring.close()

    def _make_housekeeper(self) -> Housekeeper:
        return Housekeeper(
            self._drops,
            self._keyring,
            self.catalog,
            look=lambda: self.engine_thread.alive,
            expire_log=None if self._outbox is None else self._expire_log,
            every_s=KEEP_HOUSE_S,
        )

    def _expire_log(self) -> None:
        """What waits for its reader since before every deadline is noise, and takes room."""
        if self._outbox is not None:
            self.capture.expired(self._outbox.expire(self._clock() - self._ttl_s))

    def _leave_open(self, at_work: list[str]) -> None:
        """Deliver what waits, and leave the files to those who are still at work."""
        _log.critical(
            "%s did not end within %g s; keyring, catalog and log are left open to the end of the "
            "process",
            " and ".join(at_work),
            END_TIMEOUT_S,
        )
        if self._outbox is not None:
            self._outbox.emitter.close(DRAIN_TIMEOUT_S)
        if _HOUSEKEEPING not in at_work:
            self._drops.report_last(END_TIMEOUT_S)

    def _end(self) -> list[str]:
        """Stop everything that runs; the names of what is still at work after `END_TIMEOUT_S`."""
        parts: dict[str, EngineThread | ChannelFollower | Housekeeper] = {
            "the engine": self.engine_thread,
            "the follower": self.follower,
            _HOUSEKEEPING: self.housekeeper,
        }
        for part in parts.values():
            part.stop()
        until_s = time.monotonic() + END_TIMEOUT_S
        return [
            name
            for name, part in {**parts, "an erasure": self.errands}.items()
            if not part.join(max(0.0, until_s - time.monotonic()))
        ]

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
