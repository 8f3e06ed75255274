"""The store behind one node, in one directory, on a clock that the bench moves."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.scale.traffic import PERIOD_S, START_S, TTL_S
from draftkeep.config import RetentionConfig
from draftkeep.ingest.envelope import Opener, Sealer
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.policies.keyring import Keyring
from draftkeep.policies.signing import SigningKey
from draftkeep.store.catalog import Catalog
from draftkeep.store.compactor import Compactor
from draftkeep.store.nodes import enrol_node, node_public
from draftkeep.store.storage_local import LocalStorage

TENANTS = ("tenant-0", "tenant-1", "tenant-2", "tenant-3")
_NODE = "node-0"
_LOG_BYTES = 1 << 36


class World:
    """A node, its keyring and log, and the store behind them, in one directory."""

    def __init__(self, directory: Path) -> None:
        self.now_s = START_S + 1.0
        self.storage = LocalStorage(directory / "shards")
        self.keyring = Keyring.open(
            directory / "keys",
            retention=RetentionConfig(period_s=PERIOD_S, ttl_s=TTL_S),
            clock=self.clock,
        )
        signing = SigningKey.load_or_create(directory / "node.key")
        self.sealer = Sealer(self.keyring.node_keys(), _NODE, signing, clock=self.clock)
        self.catalog = Catalog.open(directory / "catalog.db")
        enrol_node(self.catalog, _NODE, signing.public, TENANTS, START_S)
        self.log = SqliteLog(
            directory / "log", cap_bytes=_LOG_BYTES, bucket_s=PERIOD_S, clock=self.clock
        )
        self.compactor = Compactor(
            self.log,
            self.catalog,
            self.storage,
            clock=self.clock,
            issuer_public=self.keyring.issuer_public,
        )

    def clock(self) -> float:
        """The time of the newest trace."""
        return self.now_s

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


@contextmanager
def open_world(directory: Path) -> Iterator[World]:
    """The world in a directory, made where there is none."""
    directory.mkdir(parents=True, exist_ok=True)
    world = World(directory)
    try:
        yield world
    finally:
        world.close()
