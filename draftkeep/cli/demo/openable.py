"""Which of a person's traces can still be opened, asked with every key a job may hold."""

import json
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from draftkeep.config import Config, load_config
from draftkeep.errors import KeyDestroyedError
from draftkeep.ingest.envelope import Opener
from draftkeep.policies.keyring import Keyring
from draftkeep.store.catalog import Catalog
from draftkeep.store.nodes import NodePublicKeys
from draftkeep.store.reader import iter_sealed
from draftkeep.store.storage import open_storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Openable:
    """How many stored traces carry one of `aliases`, and how many of those open."""

    aliases: frozenset[bytes]
    traces: int
    opened: int

    def to_json(self) -> str:
        """For the demo's own folder; aliases stand in clear headers, so they are no secret."""
        aliases = sorted(alias.hex() for alias in self.aliases)
        return json.dumps({"aliases": aliases, "traces": self.traces, "opened": self.opened})

    @classmethod
    def from_json(cls, text: str) -> Self:
        """What `to_json` wrote."""
        value = json.loads(text)
        aliases = frozenset(bytes.fromhex(alias) for alias in value["aliases"])
        return cls(aliases=aliases, traces=value["traces"], opened=value["opened"])


def aliases_of(config_path: Path, tenant: str, subject: str) -> frozenset[bytes]:
    """What stands for a subject in clear headers; nobody can tell after an erasure."""
    with _keyring(load_config(config_path)) as keyring:
        return frozenset(alias for _, alias in keyring.aliases_of(tenant, subject))


def count_openable(config_path: Path, tenant: str, aliases: Collection[bytes]) -> Openable:
    """Try to open every stored trace of these aliases, erased ones included."""
    config = load_config(config_path)
    catalog = Catalog.configured(config)
    traces = opened = 0
    try:
        with _keyring(config) as keyring:
            opener = Opener(keyring.job_keys(), NodePublicKeys(catalog), clock=time.time)
            for sealed in iter_sealed(
                catalog,
                open_storage(config),
                tenants=[tenant],
                target=None,
                not_after_s=time.time(),
                include_erased=True,
            ):
                if sealed.parsed.alias not in aliases:
                    continue
                traces += 1
                try:
                    opener.open(sealed)
                except KeyDestroyedError:
                    continue
                opened += 1
    finally:
        catalog.close()
    return Openable(aliases=frozenset(aliases), traces=traces, opened=opened)


@contextmanager
def _keyring(config: Config) -> Iterator[Keyring]:
    keyring = Keyring.open(config.keys_path, retention=config.retention, clock=time.time)
    try:
        yield keyring
    finally:
        keyring.close()
