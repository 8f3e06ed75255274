"""How a node's configuration becomes its engine, its metrics and its follower."""

from collections.abc import Callable

from draftkeep.config import Config
from draftkeep.serve.engine.engine import Engine
from draftkeep.serve.engine.lookahead import Speculation
from draftkeep.serve.engine.ngram import NGRAM_DIGEST, NgramDrafter
from draftkeep.serve.engine.request import Finished, StepReport
from draftkeep.serve.follow import ChannelFollower
from draftkeep.serve.metrics import Metrics
from draftkeep.store.anchors import GATE, read_anchor
from draftkeep.store.models import TargetModel
from draftkeep.store.registry import Registry, scope_of


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


def cache_shape(config: Config) -> dict[str, str]:
    """The labels that tell the shape of the target's cache."""
    return {
        "block_size": str(config.serve.max_context),
        "cache_dtype": config.model.dtype,
        "num_gpu_blocks": str(config.serve.slots),
    }
