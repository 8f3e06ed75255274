"""Which of a person's traces can still be opened, asked with every key a job may hold."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from draftkeep.config import load_config
from draftkeep.errors import KeyDestroyedError
from draftkeep.ingest.envelope import Opener
from draftkeep.ingest.record import SealedTrace
from draftkeep.policies.keyring import Keyring
from draftkeep.store.catalog import Catalog
from draftkeep.store.nodes import node_public
from draftkeep.store.reader import iter_sealed


def count_openable(
    config_path: Path, tenant: str, subject: str, *, aliases: Sequence[bytes] | None = None
) -> tuple[list[bytes], int]:
    """The aliases of a subject's stored traces (one entry a trace), and how many of them open.

    After an erasure the keyring no longer knows the subject, so the aliases found before it are
    passed in: the traces may still lie in a shard, and must not open.
    """
    config = load_config(config_path)
    keyring = Keyring.open(config.keys_path, retention=config.retention, clock=time.time)
    catalog = Catalog.open(config.state_dir / "catalog.db")
    wanted = set(aliases or [alias for _, alias in keyring.aliases_of(tenant, subject)])
    opener = Opener(keyring.job_keys(), lambda name: node_public(catalog, name), clock=time.time)
    found, opened = [], 0
    shards = config.state_dir / "shards"
    for sealed in _all_sealed(catalog, shards, tenant):
        if sealed.parsed.alias not in wanted:
            continue
        found.append(sealed.parsed.alias)
        try:
            opener.open(sealed)
        except KeyDestroyedError:
            continue
        opened += 1
    return found, opened


def _all_sealed(catalog: Catalog, shards: Path, tenant: str) -> Iterator[SealedTrace]:
    return iter_sealed(
        catalog,
        shards,
        tenants=[tenant],
        target=None,
        not_after_s=time.time(),
        include_erased=True,
    )
