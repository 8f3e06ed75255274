"""What the store bench works with: traces of ten kilobytes and a node that seals them."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from draftkeep.config import RetentionConfig
from draftkeep.ingest.codec import encode_body
from draftkeep.ingest.envelope import Opener, Sealer
from draftkeep.ingest.log import Log
from draftkeep.ingest.record import encode_record
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.ingest.tables import RemapTable
from draftkeep.ingest.trace import DrafterRun, Finish, How, Provenance, TopK, Trace
from draftkeep.kernels.sampling import Sampling
from draftkeep.policies.keyring import Keyring
from draftkeep.policies.signing import SigningKey
from draftkeep.store.catalog import Catalog
from draftkeep.store.compactor import Compactor
from draftkeep.store.nodes import NodePublicKeys, enrol_node
from draftkeep.store.periods import publish_period
from draftkeep.store.storage_local import LocalStorage

MB = 1e6
K = 32
# A real answer of so many positions takes about ten kilobytes; so do these.
POSITIONS = 142
PROMPT_TOKENS = 60
NODE, TENANT = "bench-node", "bench"
TARGET, TOKENIZER = b"T" * 32, b"K" * 32
LOG_CAP_BYTES = 16 * 1024**3
_IDS = 3000
_SUBJECTS = 100
_BODIES = 200
_BUCKET_S = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much each part measures."""

    traces: int = 10_000
    appends: int = 30_000
    reads: int = 5000
    offers: int = 3000
    shards: int = 100_000
    ids_a_shard: int = 10
    commits: int = 60


QUICK = Sizes(
    traces=300, appends=600, reads=200, offers=200, shards=1000, ids_a_shard=10, commits=10
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One metric as a part found it. `conditions` are this metric's own."""

    metric: str
    value: float
    unit: str
    against: str = ""
    conditions: Mapping[str, object] = field(default_factory=dict)


def make_trace(seed: int) -> Trace:
    """A trace that packs to about ten kilobytes; nothing in it is real."""
    draw = np.random.default_rng(seed)
    shape = (POSITIONS, K)
    ids_TK = np.stack([draw.permutation(_IDS)[:K] for _ in range(POSITIONS)]).astype(np.int32)
    return Trace(
        prompt_ids_P=draw.integers(0, 49_000, PROMPT_TOKENS).astype(np.int32),
        output_ids_T=ids_TK[:, 0].copy(),
        topk=TopK(
            ids_TK=ids_TK,
            logprobs_TK=-np.sort(draw.exponential(3.0, shape).astype(np.float32), axis=1),
            k_T=np.full(POSITIONS, K, np.uint8),
            tail_T=np.full(POSITIONS, -3.0, np.float32),
            tail_known_T=np.ones(POSITIONS, np.bool_),
        ),
        how_T=np.full(POSITIONS, How.ACCEPTED, np.uint8),
        rejected_T=np.full(POSITIONS, -1, np.int32),
        sampling=Sampling(temperature=0.7, eos_ids=(2,)),
        seed=seed,
        choice=0,
        finish=Finish.STOP,
        drafters=(DrafterRun(drafter=b"d" * 32, context_start=0, positions=POSITIONS),),
    )


class Node:
    """An enrolled node, its keyring and its catalog, in one directory on the disk to measure."""

    def __init__(self, directory: Path, sizes: Sizes, clock: Callable[[], float]) -> None:
        self.directory = directory
        self.sizes = sizes
        self.clock = clock
        self.keyring = Keyring.open(directory / "keys", retention=RetentionConfig(), clock=clock)
        self.signing = SigningKey.load_or_create(directory / "keys" / "node.key")
        self.sealer = Sealer(self.keyring.node_keys(), NODE, self.signing, clock=clock)
        self.storage = LocalStorage(directory / "shards")
        self._sealed: list[bytes] = []

    def close(self) -> None:
        """Close the keyring."""
        self.keyring.close()

    def provenance(self, number: int) -> Provenance:
        """Where trace `number` comes from; a hundred subjects in turn."""
        return Provenance(
            tenant=TENANT,
            subject=f"subject-{number % _SUBJECTS}",
            response_id=os.urandom(16),
            domain="sql",
            consent=0,
            policy_version=1,
            created_s=int(self.clock()),
            target=TARGET,
            tokenizer=TOKENIZER,
        )

    def records(self, count: int) -> list[bytes]:
        """So many log records, each sealed by itself; made once and kept."""
        if len(self._sealed) < count:
            bodies = [
                encode_body(make_trace(seed), RemapTable.identity()) for seed in range(_BODIES)
            ]
            for number in range(len(self._sealed), count):
                sealed = self.sealer.seal(
                    bodies[number % _BODIES],
                    self.provenance(number),
                    prompt_tokens=PROMPT_TOKENS,
                    positions=POSITIONS,
                )
                self._sealed.append(encode_record(sealed))
        return self._sealed[:count]

    @contextmanager
    def log(self) -> Iterator[SqliteLog]:
        """An empty embedded log, removed at the end."""
        with TemporaryDirectory(dir=self.directory) as name:
            log = SqliteLog(
                Path(name), cap_bytes=LOG_CAP_BYTES, bucket_s=_BUCKET_S, clock=self.clock
            )
            try:
                yield log
            finally:
                log.close()

    @contextmanager
    def catalog(self) -> Iterator[Catalog]:
        """An empty SQLite catalog that knows the node and its periods, removed at the end."""
        with TemporaryDirectory(dir=self.directory) as name:
            catalog = Catalog.open(Path(name) / "catalog.db")
            try:
                enrol_node(catalog, NODE, self.signing.public, [TENANT], self.clock())
                for record in self.keyring.periods():
                    publish_period(catalog, record)
                yield catalog
            finally:
                catalog.close()

    def compactor(self, log: Log, catalog: Catalog) -> Compactor:
        """A compactor of this log."""
        return Compactor(
            log,
            catalog,
            self.storage,
            clock=self.clock,
            issuer_public=self.keyring.issuer_public,
        )

    def opener(self, catalog: Catalog) -> Opener:
        """What a job opens traces with."""
        return Opener(self.keyring.job_keys(), NodePublicKeys(catalog), clock=self.clock)


@contextmanager
def running_node(parent: Path, sizes: Sizes) -> Iterator[Node]:
    """A node in a temporary directory under `parent`."""
    with TemporaryDirectory(dir=parent) as name:
        node = Node(Path(name), sizes, time.time)
        try:
            yield node
        finally:
            node.close()
