"""Drafters from the command line: what is registered, the cold one, and the way back to one."""

import re
import time

from rich.table import Table

from draftkeep.cli.tables import plain_table, utc
from draftkeep.config import Config
from draftkeep.errors import ConfigError, InputError
from draftkeep.policies.signing import SigningKey
from draftkeep.store.anchors import GATE, publish_anchor
from draftkeep.store.catalog import Catalog
from draftkeep.store.registry import EVERYONE, Registry, scope_of, tenant_scope

# The rest is in the catalog: draftkeep audit "SELECT measures FROM drafters".
SHOWN = ("replay", "tokens_per_step", "estimated_speed_up")


def list_table(config: Config) -> Table:
    """One row a drafter, newest first, with the channels that point at it."""
    columns = ("drafter", "status", "channels", "scope", "signed", "parent", "created", "measures")
    catalog = Catalog.configured(config, create=False, migrate=False)
    try:
        registry = Registry(catalog, config.state_dir / "drafters")
        scopes = {EVERYONE, *(tenant_scope(tenant.name) for tenant in config.tenants)}
        serving = {scope: registry.channel(scope, config.serve.channel) for scope in scopes}
        rows = [
            (
                row.digest.hex()[:12],
                row.status,
                ", ".join(
                    sorted(
                        f"{scope}/{config.serve.channel}"
                        for scope, digest in serving.items()
                        if digest == row.digest
                    )
                ),
                row.scope,
                "yes" if row.signed else "no",
                row.parent.hex()[:12] if row.parent else "",
                utc(row.created_s),
                ", ".join(
                    f"{name} {row.measures[name]:.3f}" for name in SHOWN if name in row.measures
                ),
            )
            for row in registry.list()
        ]
    finally:
        catalog.close()
    return plain_table(columns, rows)


def publish_cold(config: Config) -> bytes:
    """Make the floor: the target's own first layers, untrained. Returns its digest.

    It has learned from nobody, so it may serve everybody and needs no proof; every later drafter
    can fall back to it. It is put on the node's channel and on each tenant's, where they are
    empty. Repeating it changes nothing.
    """
    from draftkeep.store.models.drafter import cold_drafter, save_drafter
    from draftkeep.store.models.target import load_target

    target = load_target(config.model.target)
    drafter = cold_drafter(target, layers=config.distill.layers, vocab=config.distill.vocab)
    tenants = tuple(tenant.name for tenant in config.tenants)
    gate = SigningKey.load_or_create(config.keys_path / "gate.key")
    publish_anchor(config.state_dir, GATE, gate.public)
    catalog = Catalog.configured(config)
    registry = Registry(catalog, config.state_dir / "drafters")
    try:
        # A fixed creation time: the same target and configuration give the same drafter.
        digest = save_drafter(drafter, config.state_dir / "drafters", created_s=0)
        registry.register(digest, scope=EVERYONE, inputs=(), at_s=time.time())
        registry.admit(digest, gate.sign)
        for scope in {scope_of(tenants), *map(tenant_scope, tenants)}:
            if registry.channel(scope, config.serve.channel) is None:
                registry.set_channel(scope, config.serve.channel, digest, at_s=time.time())
    finally:
        catalog.close()
    return digest


def use_drafter(config: Config, wanted: str, *, tenant: str | None) -> str:
    """Point a tenant's channel, or the node's own, at a drafter; returns what was done.

    `wanted` is the beginning of a digest, or "none", which leaves nodes to the floor. InputError
    where it names no drafter or several, or one whose files are not here; ConfigError without a
    tenant; DeniedError where that drafter may not serve there.
    """
    names = tuple(item.name for item in config.tenants)
    if not names:
        raise ConfigError("no tenant is configured, so no channel is meant; use a node's file")
    scope = scope_of(names) if tenant is None else tenant_scope(tenant)
    catalog = Catalog.configured(config, create=False)
    try:
        registry = Registry(catalog, config.state_dir / "drafters")
        digest = None if wanted == "none" else _find(registry, wanted)
        before = registry.channel(scope, config.serve.channel)
        registry.set_channel(scope, config.serve.channel, digest, at_s=time.time())
    finally:
        catalog.close()
    now, then = (item.hex()[:12] if item else "no drafter" for item in (digest, before))
    return f"{scope}/{config.serve.channel}: nodes get {now}, before {then}"


def _find(registry: Registry, wanted: str) -> bytes:
    if re.fullmatch("[0-9a-fA-F]{8,64}", wanted) is None:
        raise InputError(
            f"{wanted!r} names no drafter, expected the first 8 to 64 hexadecimal digits of its "
            "digest; draftkeep drafters list shows 12"
        )
    found = [row.digest for row in registry.list() if row.digest.hex().startswith(wanted.lower())]
    if not found:
        raise InputError(f"no drafter begins with {wanted}; draftkeep drafters list shows all")
    if len(found) > 1:
        raise InputError(f"{len(found)} drafters begin with {wanted}; give more digits")
    (digest,) = found
    path = registry.path(digest)
    if not path.is_dir():
        raise InputError(
            f"drafter {wanted} is not below {path.parent}; run this where the nodes' drafters/ is, "
            "or restore it there"
        )
    return digest
