"""How a node's configuration becomes its parts.

A node can serve without those that `open_...` sees to: whatever fails there is logged and costs
capture, never a start.
"""

import logging
from collections.abc import Callable

from draftkeep.config import Config
from draftkeep.errors import PermanentError, StoreError
from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.policies.keyring import Keyring
from draftkeep.policies.signing import SigningKey
from draftkeep.serve.engine.engine import Engine
from draftkeep.serve.engine.lookahead import Speculation
from draftkeep.serve.engine.ngram import NGRAM_DIGEST, NgramDrafter
from draftkeep.serve.engine.request import Finished, StepReport
from draftkeep.serve.follow import ChannelFollower
from draftkeep.serve.metrics import Metrics
from draftkeep.serve.outbox import Outbox
from draftkeep.serve.problems import reason_of
from draftkeep.store.anchors import GATE, ISSUER, publish_anchor, read_anchor
from draftkeep.store.catalog import Catalog
from draftkeep.store.models.target import TargetModel
from draftkeep.store.nodes import enrol_node
from draftkeep.store.registry import Registry, scope_of

_log = logging.getLogger(__name__)


def make_engine(
    config: Config,
    target: TargetModel,
    *,
    on_finish: Callable[[Finished], None],
    on_problem: Callable[[str, BaseException], None],
    on_step: Callable[[StepReport], None],
) -> Engine:
    """The engine over the target, which is its own from here on. Raises ModelError."""
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


def make_metrics(config: Config) -> Metrics:
    """Counts by the domains that the tenants show."""
    shown = [tenant for tenant in config.tenants if not tenant.hide_domain]
    return Metrics(
        domains={domain for tenant in shown for domain in tenant.domains},
        names={NGRAM_DIGEST: "ngram"},
        max_context=config.serve.max_context,
        lookahead=config.serve.lookahead,
    )


def make_follower(
    config: Config, engine: Engine, registry: Registry, target: TargetModel
) -> ChannelFollower:
    """The follower of the channel in the scope that the configured tenants share."""
    return ChannelFollower(
        engine,
        registry,
        target,
        scope=scope_of([tenant.name for tenant in config.tenants]),
        channel=config.serve.channel,
        gate_public=lambda: read_anchor(config.state_dir, GATE),
        every_s=config.serve.follow_s,
    )


def open_keyring(config: Config, *, clock: Callable[[], float]) -> Keyring | None:
    """None where it cannot be used. Erasure and deadlines need it without capture, too."""
    try:
        return Keyring.open(config.keys_path, retention=config.retention, clock=clock)
    except Exception as error:
        _log.error(
            "serving without a keyring, so without capture; no expired key is destroyed until a "
            "start can open it: %s",
            reason_of(error),
        )
        return None


def open_catalog(
    config: Config, keyring: Keyring | None, *, clock: Callable[[], float]
) -> tuple[Catalog, SigningKey | None]:
    """The catalog, and the key with which this node is enrolled there; None where it is not.

    Raises what `Catalog.configured` raises, and StoreError where PostgreSQL is lost before the node
    is enrolled: without that no trace of its own would ever be taken.
    """
    catalog = Catalog.configured(config)
    try:
        return catalog, _enrol(config, keyring, catalog, clock)
    except BaseException:
        catalog.close()
        raise


def _enrol(
    config: Config, keyring: Keyring | None, catalog: Catalog, clock: Callable[[], float]
) -> SigningKey | None:
    if not config.capture.enabled or keyring is None:
        return None
    name, tenants = config.serve.node, [tenant.name for tenant in config.tenants]
    try:
        publish_anchor(config.state_dir, ISSUER, keyring.issuer_public)
        signing = SigningKey.load_or_create(config.keys_path / f"node-{name}.key")
    except Exception as error:
        _say_without_capture(error)
        return None
    try:
        enrol_node(catalog, name, signing.public, tenants, clock())
    except Exception as error:
        lost = isinstance(error, StoreError) and not isinstance(error, PermanentError)
        if lost and config.catalog.url:
            raise
        _say_without_capture(error)
        return None
    return signing


def _say_without_capture(error: Exception) -> None:
    _log.error("serving without capture: %s", reason_of(error))


def open_outbox(
    config: Config,
    keyring: Keyring | None,
    signing: SigningKey | None,
    catalog: Catalog,
    *,
    clock: Callable[[], float],
    on_drop: Callable[[str], None],
) -> Outbox | None:
    """None where nothing is to be captured, or nothing can be. `on_drop` is the emitter's.

    `signing` is the key with which the node is enrolled; without it nothing it sealed were taken.

    Raises ConfigError where the brokers' password cannot be read.
    """
    if keyring is None or signing is None:
        return None
    brokers = KafkaAccess.configured(config.kafka) if config.kafka.servers else None
    try:
        return Outbox.build(
            config,
            keyring=keyring,
            signing=signing,
            catalog=catalog,
            brokers=brokers,
            clock=clock,
            on_drop=on_drop,
        )
    except Exception as error:
        _say_without_capture(error)
        return None


def cache_shape(config: Config) -> dict[str, str]:
    """The labels that tell the shape of the target's cache."""
    return {
        "block_size": str(config.serve.max_context),
        "cache_dtype": config.model.dtype,
        "num_gpu_blocks": str(config.serve.slots),
    }
