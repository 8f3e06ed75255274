"""What `draftkeep doctor` checks of device, target and drafter. torch is imported only here."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from draftkeep.cli.doctor.finding import Finding
from draftkeep.config import Config

if TYPE_CHECKING:
    from draftkeep.store.models.target import TargetModel


def check_device(config: Config) -> Finding:
    """Is the configured device there, and does the number format suit it?"""
    import torch

    device = config.model.device
    shown = f"{device}, {config.model.dtype}"
    if device != "cpu":
        index, seen = int(device.partition(":")[2] or 0), torch.cuda.device_count()
        if index >= seen:
            return Finding(
                check="device",
                status="fail",
                detail=f"{device} is configured, and torch sees {seen} of its kind",
                remedy="set model.device to cpu, or install the driver and a torch built for it",
            )
    elif config.model.dtype == "float16":
        return Finding(
            check="device",
            status="warn",
            detail=f"{shown} is slow and coarse on a CPU",
            remedy="set model.dtype to float32",
        )
    return Finding(check="device", status="ok", detail=shown)


def load_configured(config: Config) -> "TargetModel":
    """The configured target. Raises ModelError."""
    from draftkeep.store.models.target import load_target

    model = config.model
    return load_target(model.target, device=model.device, dtype=model.dtype)


def check_model(config: Config, *, target: Callable[[], "TargetModel"]) -> Finding:
    """Does the target load, and do context and tokenizer fit it? Raises what `target` raises."""
    loaded = target()
    limit = int(loaded.model.config.max_position_embeddings)
    if config.serve.max_context > limit:
        return Finding(
            check="model",
            status="fail",
            detail=f"serve.max_context {config.serve.max_context} is over the model's {limit}",
            remedy=f"set serve.max_context to {limit} or less",
        )
    size = len(loaded.tokenizer)
    if size > loaded.vocab:
        return Finding(
            check="model",
            status="fail",
            detail=f"the tokenizer has {size} ids, the model only {loaded.vocab}",
            remedy="use the tokenizer that came with the model",
        )
    mark = loaded.target_fingerprint.hex()[:12]
    return Finding(check="model", status="ok", detail=f"{config.model.target}, {mark}")


def check_drafter(config: Config, *, target: Callable[[], "TargetModel"]) -> Finding:
    """Would the node draft with what its channel points at?

    Raises ModelError, StoreError and what `target` raises.
    """
    from draftkeep.store.anchors import GATE, read_anchor
    from draftkeep.store.catalog import Catalog
    from draftkeep.store.models.drafter import load_drafter
    from draftkeep.store.registry import Registry, scope_of

    drafts = "drafts from its own text" if config.serve.floor == "ngram" else "does not speculate"
    nothing = Finding(
        check="drafter",
        status="warn",
        detail=f"channel {config.serve.channel} is empty; the service {drafts}",
        remedy="draftkeep drafters cold",
    )
    catalog = Catalog.existing(config)
    if catalog is None:
        return nothing
    try:
        loaded = target()
        # As the node does, so that what does not fit there does not fit here.
        embedding_VC = loaded.model.get_input_embeddings().weight
        scope = scope_of(tuple(tenant.name for tenant in config.tenants))
        registry = Registry(catalog, config.state_dir / "drafters")
        digest = registry.channel(scope, config.serve.channel)
        if digest is None:
            return nothing
        drafter = load_drafter(
            registry.path(digest),
            gate_public=read_anchor(config.state_dir, GATE),
            expect_tokenizer=loaded.tokenizer_fingerprint,
            expect_vocab=loaded.vocab,
            share_embeddings=embedding_VC,
            device=embedding_VC.device,
            dtype=embedding_VC.dtype,
        )
    finally:
        catalog.close()
    if drafter.manifest.target != loaded.target_fingerprint.hex():
        return Finding(
            check="drafter",
            status="fail",
            detail=f"{digest.hex()[:12]} was made for another target model",
            remedy="serve that target again, or start over in a fresh state_dir",
        )
    return Finding(check="drafter", status="ok", detail=f"{scope} drafts with {digest.hex()[:12]}")
