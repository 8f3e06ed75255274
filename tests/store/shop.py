"""A registry and drafters to put in it, whose weights do not matter."""

from dataclasses import dataclass, field
from pathlib import Path

import sqlalchemy as sa

from draftkeep.policies.signing import SigningKey
from draftkeep.store import schema
from draftkeep.store.catalog import Catalog
from draftkeep.store.jobs import JobInput
from draftkeep.store.models.drafter_files import write_files
from draftkeep.store.models.manifest import Manifest
from draftkeep.store.registry import Registry
from tests.store.erasure_row import insert_erasure

GATE = SigningKey(b"g" * 32)
PERIOD = b"p" * 16


def learned(alias: bytes, tenant: str = "acme") -> JobInput:
    return JobInput(tenant=tenant, alias=alias, period_id=PERIOD, positions=10)


@dataclass
class Shop:
    """A registry, and drafters whose weights do not matter to it."""

    root: Path
    catalog: Catalog
    registry: Registry
    made: list[bytes] = field(default_factory=list)

    def save(self, parent: bytes | None = None) -> bytes:
        manifest = Manifest(
            target="a" * 64,
            tokenizer="b" * 64,
            layers=2,
            vocab=8,
            created_s=len(self.made),
            parent=parent.hex() if parent else None,
            measures={"replay_acceptance": 0.7},
        )
        files = {"draftkeep.json": manifest.encode(), "model.safetensors": b"weights"}
        self.made.append(write_files(self.root / "drafters", files))
        return self.made[-1]

    def registered(
        self, *aliases: bytes, parent: bytes | None = None, scope: str = "acme", admit: bool = True
    ) -> bytes:
        digest = self.save(parent)
        self.registry.register(
            digest, scope=scope, inputs=[learned(alias) for alias in aliases], at_s=len(self.made)
        )
        if admit:
            self.registry.admit(digest, GATE.sign)
        return digest

    def bury(
        self, kind: str, value: bytes, period_id: bytes = PERIOD, tenant: str = "acme"
    ) -> None:
        with self.catalog.begin() as connection:
            insert_erasure(connection, value, tenant=tenant, aliases=1)
            connection.execute(
                sa.insert(schema.tombstones).values(
                    kind=kind,
                    value=value,
                    period_id=period_id,
                    tenant=tenant,
                    erasure=value,
                    at_s=1.0,
                )
            )

    def mark(self, digest: bytes, status: str) -> None:
        with self.catalog.begin() as connection:
            connection.execute(
                sa.update(schema.drafters)
                .where(schema.drafters.c.digest == digest)
                .values(status=status)
            )
