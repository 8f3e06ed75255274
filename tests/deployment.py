"""A little deployment in one directory, of the package's own parts, on a hand clock.

What the store's and the job's tests and the scale bench have in common; each adds its own.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from draftkeep.config import RetentionConfig
from draftkeep.ingest.envelope import Opener, Sealer
from draftkeep.ingest.record import SealedTrace, encode_record
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.ingest.trace import Provenance
from draftkeep.policies.keyring import Keyring
from draftkeep.policies.signing import SigningKey
from draftkeep.store.catalog import Catalog
from draftkeep.store.compactor import Compactor
from draftkeep.store.nodes import enrol_node, node_public
from draftkeep.store.periods import publish_period
from draftkeep.store.rewriter import RewriteReport, merge, random_serial, rewrite_erased
from draftkeep.store.storage import Storage
from draftkeep.store.storage_local import LocalStorage
from tests.clock import Clock

PERIOD_S, TTL_S = 3600, 7 * 86400
# Far ahead of every machine's clock: the age of a real file is told by the hand clock.
START_S = 4_000_000_000 // PERIOD_S * PERIOD_S
RETENTION = RetentionConfig(period_s=PERIOD_S, ttl_s=TTL_S)


@dataclass(kw_only=True)
class Deployment:
    """A keyring, one enrolled node with its log, and the store behind it; all ask `clock`."""

    root: Path
    clock: Clock
    keyring: Keyring
    signing: SigningKey
    sealer: Sealer
    log: SqliteLog
    catalog_url: str
    catalog: Catalog
    storage: Storage

    @classmethod
    def open(
        cls,
        root: Path,
        *,
        clock: Clock,
        tenants: Collection[str],
        catalog_url: str = "",
        keys_dir: Path | None = None,
        log_bytes: int = 1 << 30,
        log_bucket_s: int = 600,
        **more: Any,
    ) -> Self:
        """What is in `root`, made where it is not there; `more` is what a subclass adds.

        The catalog is in `root` too where no URL says otherwise, and so are the keys. The caller
        closes it.
        """
        root.mkdir(parents=True, exist_ok=True)
        keys_dir = keys_dir or root / "keys"
        catalog_url = catalog_url or f"sqlite:///{root / 'catalog.db'}"
        keyring = Keyring.open(keys_dir, retention=RETENTION, clock=clock)
        signing = SigningKey.load_or_create(keys_dir / "node-n1.key")
        catalog = Catalog.connect(catalog_url)
        enrol_node(catalog, "n1", signing.public, tenants, clock())
        return cls(
            root=root,
            clock=clock,
            keyring=keyring,
            signing=signing,
            sealer=Sealer(keyring.node_keys(), "n1", signing, clock=clock),
            log=SqliteLog(root / "log", cap_bytes=log_bytes, bucket_s=log_bucket_s, clock=clock),
            catalog_url=catalog_url,
            catalog=catalog,
            storage=LocalStorage(root / "shards"),
            **more,
        )

    @property
    def shards_dir(self) -> Path:
        """Where the shards are, unless `storage` was changed."""
        return self.root / "shards"

    def seal_as(
        self, provenance: Provenance, body: bytes, *, prompt_tokens: int, positions: int
    ) -> SealedTrace:
        """Seal, and publish the period that it is of."""
        publish_period(
            self.catalog, self.keyring.ensure_period(provenance.tenant, provenance.created_s)
        )
        return self.sealer.seal(body, provenance, prompt_tokens=prompt_tokens, positions=positions)

    def append(self, *sealed: SealedTrace) -> None:
        """Into the log, in one append."""
        self.log.append([encode_record(item) for item in sealed])

    def compactor(self, **changes: Any) -> Compactor:
        """A compactor of its log, or with other parts and settings."""
        values: dict[str, Any] = {
            "log": self.log,
            "catalog": self.catalog,
            "storage": self.storage,
            "clock": self.clock,
            "issuer_public": self.keyring.issuer_public,
        }
        return Compactor(**(values | changes))

    def rewrite_erased(self, **changes: Any) -> RewriteReport:
        """Rewrite the shards that hold erased rows."""
        return rewrite_erased(**(self._rewriting() | changes))

    def merge(self, target_bytes: int, **changes: Any) -> RewriteReport:
        """Join shards under `target_bytes`."""
        return merge(target_bytes=target_bytes, **(self._rewriting() | changes))

    def _rewriting(self) -> dict[str, Any]:
        return {
            "catalog": self.catalog,
            "storage": self.storage,
            "now_s": self.clock(),
            "new_serial": random_serial,
        }

    def opener(self) -> Opener:
        """What a job opens traces with."""
        return Opener(
            self.keyring.job_keys(),
            lambda name: node_public(self.catalog, name),
            clock=self.clock,
        )

    def close(self) -> None:
        """End the log's thread and close everything."""
        self.log.close()
        self.catalog.close()
        self.keyring.close()
