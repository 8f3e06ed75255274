"""Workbench: what a job for one tenant works with, opened together and closed together."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from draftkeep.config import Config
from draftkeep.distill.precision import native_bfloat16
from draftkeep.distill.recipe import Recipe
from draftkeep.distill.selection import Decode
from draftkeep.errors import ConfigError
from draftkeep.ingest.codec import decode_bodies
from draftkeep.ingest.envelope import Opener
from draftkeep.ingest.tables import TableStore
from draftkeep.policies.keyring import JobKeys
from draftkeep.policies.signing import SigningKey
from draftkeep.store.anchors import GATE, publish_anchor
from draftkeep.store.catalog import Catalog
from draftkeep.store.models.target import TargetModel, load_target
from draftkeep.store.nodes import NodePublicKeys
from draftkeep.store.registry import Registry
from draftkeep.store.storage import Storage, open_storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Workbench:
    """Open stores, keys and models of one tenant's scope. `gate` signs what is admitted."""

    config: Config
    tenant: str
    scope: str
    clock: Callable[[], float]
    catalog: Catalog
    storage: Storage
    registry: Registry
    keys: JobKeys
    opener: Opener
    decode: Decode
    gate: SigningKey
    target: TargetModel

    @property
    def jobs_dir(self) -> Path:
        """Where stopped jobs wait."""
        return self.config.state_dir / "jobs"

    @property
    def drafters_dir(self) -> Path:
        """Where drafters lie."""
        return self.config.state_dir / "drafters"

    @property
    def recipe(self) -> Recipe:
        """How the configuration says to train on this machine."""
        distill = self.config.distill
        return Recipe(
            learning_rate=distill.learning_rate,
            batch_traces=distill.batch_traces,
            seed=distill.seed,
            seconds=distill.seconds,
            steps=distill.steps,
            checkpoint_s=distill.checkpoint_s,
            bfloat16=native_bfloat16(),
        )


@contextmanager
def open_workbench(
    config: Config, *, tenant: str, clock: Callable[[], float]
) -> Iterator[Workbench]:
    """Open everything a job needs, and publish the gate's public key for those who load drafters.

    ConfigError for a tenant that is not configured, and where another gate key was published.
    """
    if tenant not in {known.name for known in config.tenants}:
        raise ConfigError(f"no tenant {tenant!r:.80} in the configuration; add a [[tenants]] entry")
    target = load_target(config.model.target)
    storage = open_storage(config)
    catalog = Catalog.configured(config)
    try:
        keys = JobKeys.open(config.keys_path, clock=clock)
        try:
            gate = SigningKey.load_or_create(config.keys_path / "gate.key")
            publish_anchor(config.state_dir, GATE, gate.public)
            tables = TableStore(config.state_dir / "tables")
            yield Workbench(
                config=config,
                tenant=tenant,
                scope=f"tenant:{tenant}",
                clock=clock,
                catalog=catalog,
                storage=storage,
                registry=Registry(catalog, config.state_dir / "drafters"),
                keys=keys,
                opener=Opener(keys, NodePublicKeys(catalog), clock=clock),
                decode=lambda bodies: decode_bodies(bodies, tables),
                gate=gate,
                target=target,
            )
        finally:
            keys.close()
    finally:
        catalog.close()
