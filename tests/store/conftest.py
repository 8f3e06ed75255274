"""A whole little deployment on disk: keyring, nodes, log, catalog and shards, on a hand clock."""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy.engine import Connection

from draftkeep.config import RetentionConfig
from draftkeep.ingest.envelope import Opener, Sealer, signed_message
from draftkeep.ingest.record import SealedTrace, encode_record
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.ingest.trace import Provenance
from draftkeep.policies.keyring import Keyring
from draftkeep.policies.signing import SigningKey
from draftkeep.store.catalog import Catalog
from draftkeep.store.compactor import Compactor
from draftkeep.store.nodes import enrol_node, node_public
from draftkeep.store.periods import publish_period
from draftkeep.store.reader import iter_sealed

PERIOD_S = 3600
TTL_S = 7 * 86400
START_S = 1_800_000_000 // PERIOD_S * PERIOD_S
TARGET = b"T" * 32
TENANTS = ("acme", "birch")


@dataclass
class HandClock:
    """Time that moves only when told to."""

    now_s: float = START_S + 60.0

    def __call__(self) -> float:
        return self.now_s


@dataclass
class World:
    """One node and everything behind it. `seal` makes real sealed traces."""

    root: Path
    clock: HandClock
    keyring: Keyring
    signing: SigningKey
    sealer: Sealer
    log: SqliteLog
    catalog: Catalog
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    @property
    def shards_dir(self) -> Path:
        return self.root / "shards"

    def provenance(self, **changes: Any) -> Provenance:
        values: dict[str, Any] = {
            "tenant": "acme",
            "subject": None,
            "response_id": self.rng.randbytes(16),
            "domain": "unknown",
            "consent": 0,
            "policy_version": 1,
            "created_s": int(self.clock()),
            "target": TARGET,
            "tokenizer": b"K" * 32,
        }
        return Provenance(**(values | changes))

    def seal(self, body: bytes = b"body", **changes: Any) -> SealedTrace:
        provenance = self.provenance(**changes)
        publish_period(
            self.catalog, self.keyring.ensure_period(provenance.tenant, provenance.created_s)
        )
        return self.sealer.seal(body, provenance, prompt_tokens=3, positions=5)

    def append(self, *sealed: SealedTrace) -> None:
        self.log.append([encode_record(item) for item in sealed])

    def compactor(self, **changes: Any) -> Compactor:
        values: dict[str, Any] = {
            "clock": self.clock,
            "issuer_public": self.keyring.issuer_public,
        }
        return Compactor(
            changes.pop("log", self.log),
            changes.pop("catalog", self.catalog),
            self.shards_dir,
            **(values | changes),
        )

    def opener(self) -> Opener:
        return Opener(
            self.keyring.job_keys(),
            lambda name: node_public(self.catalog, name),
            clock=self.clock,
        )

    def stored(self, **changes: Any) -> list[SealedTrace]:
        values: dict[str, Any] = {
            "tenants": None,
            "target": None,
            "not_after_s": self.clock(),
        }
        return list(iter_sealed(self.catalog, self.shards_dir, **(values | changes)))

    def files(self) -> set[str]:
        if not self.shards_dir.exists():
            return set()
        return {path.name for path in self.shards_dir.iterdir()}


class HookedCatalog(Catalog):
    """A catalog that runs something before its next write transaction."""

    hook: Callable[[], object] | None = None

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        hook, self.hook = self.hook, None
        if hook is not None:
            hook()
        with super().begin() as connection:
            yield connection


def ids(sealed: Iterable[SealedTrace]) -> list[bytes]:
    """The trace ids, sorted."""
    return sorted(item.parsed.trace_id for item in sealed)


def resign(world: World, sealed: SealedTrace, **header: object) -> SealedTrace:
    """The same record under a changed header, signed by the same node."""
    changed = replace(sealed.parsed, **header).encode()  # type: ignore[arg-type]
    message = signed_message(changed, sealed.nonce, sealed.ciphertext, sealed.commitment)
    return replace(sealed, header=changed, signature=world.signing.sign(message))


def make_world(root: Path) -> World:
    clock = HandClock()
    retention = RetentionConfig(period_s=PERIOD_S, ttl_s=TTL_S)
    keyring = Keyring.open(root / "keys", retention=retention, clock=clock)
    signing = SigningKey.load_or_create(root / "keys" / "node-n1.key")
    log = SqliteLog(root / "log", cap_bytes=1 << 30, bucket_s=600, clock=clock)
    catalog = Catalog.open(root / "catalog.db")
    enrol_node(catalog, "n1", signing.public, TENANTS, clock())
    return World(
        root=root,
        clock=clock,
        keyring=keyring,
        signing=signing,
        sealer=Sealer(keyring.node_keys(), "n1", signing, clock=clock),
        log=log,
        catalog=catalog,
    )


def close_world(world: World) -> None:
    world.log.close()
    world.catalog.close()
    world.keyring.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = make_world(tmp_path)
    yield made
    close_world(made)
