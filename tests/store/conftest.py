"""A whole little deployment on disk: keyring, nodes, log, catalog and shards, on a hand clock.

Everything that asks for `catalog_url` or `world` runs on SQLite and on PostgreSQL.
"""

import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
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
from draftkeep.store.rewriter import RewriteReport, merge, random_serial, rewrite_erased
from draftkeep.store.shard_writer import Row
from draftkeep.store.storage import Storage
from draftkeep.store.storage_local import LocalStorage
from draftkeep.store.storage_objects import ObjectStorage
from tests.clock import Clock
from tests.services.postgres import Postgres
from tests.services.s3 import Bucket

PERIOD_S = 3600
TTL_S = 7 * 86400
START_S = 1_800_000_000 // PERIOD_S * PERIOD_S
TARGET = b"T" * 32
TENANTS = ("acme", "birch")
DATABASES = ("sqlite", "postgresql")


@dataclass
class World:
    """One node and everything behind it. `seal` makes real sealed traces."""

    root: Path
    clock: Clock
    keyring: Keyring
    signing: SigningKey
    sealer: Sealer
    log: SqliteLog
    catalog_url: str
    catalog: Catalog
    storage: Storage = field(init=False)
    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def __post_init__(self) -> None:
        self.storage = LocalStorage(self.shards_dir)

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
            self.storage,
            **(values | changes),
        )

    def rewrite_erased(self, **changes: Any) -> RewriteReport:
        values: dict[str, Any] = {"now_s": self.clock(), "new_serial": random_serial}
        catalog = changes.pop("catalog", self.catalog)
        return rewrite_erased(catalog, self.storage, **(values | changes))

    def merge(self, target_bytes: int, **changes: Any) -> RewriteReport:
        values: dict[str, Any] = {"now_s": self.clock(), "new_serial": random_serial}
        catalog = changes.pop("catalog", self.catalog)
        return merge(catalog, self.storage, target_bytes=target_bytes, **(values | changes))

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
        return list(iter_sealed(self.catalog, self.storage, **(values | changes)))

    def files(self) -> set[str]:
        return {file.name for file in self.storage.list()}


class HookedCatalog(Catalog):
    """A catalog that runs something before its next write transaction."""

    hook: Callable[[], object] | None = None

    @contextmanager
    def begin(self, *, shared: bool = False) -> Iterator[Connection]:
        hook, self.hook = self.hook, None
        if hook is not None:
            hook()
        with super().begin(shared=shared) as connection:
            yield connection


def ids(sealed: Iterable[SealedTrace]) -> list[bytes]:
    """The trace ids, sorted."""
    return sorted(item.parsed.trace_id for item in sealed)


def rows(sealed: Iterable[SealedTrace]) -> list[Row]:
    """What `write_shard` takes."""
    return [(item.parsed, item) for item in sealed]


def resign(world: World, sealed: SealedTrace, **header: object) -> SealedTrace:
    """The same record under a changed header, signed by the same node."""
    changed = replace(sealed.parsed, **header).encode()  # type: ignore[arg-type]
    message = signed_message(changed, sealed.nonce, sealed.ciphertext, sealed.commitment)
    return replace(sealed, header=changed, signature=world.signing.sign(message))


def make_world(root: Path, catalog_url: str, *, now_s: float = START_S + 60.0) -> World:
    clock = Clock(now_s)
    retention = RetentionConfig(period_s=PERIOD_S, ttl_s=TTL_S)
    keyring = Keyring.open(root / "keys", retention=retention, clock=clock)
    signing = SigningKey.load_or_create(root / "keys" / "node-n1.key")
    log = SqliteLog(root / "log", cap_bytes=1 << 30, bucket_s=600, clock=clock)
    catalog = Catalog.connect(catalog_url)
    enrol_node(catalog, "n1", signing.public, TENANTS, clock())
    return World(
        root=root,
        clock=clock,
        keyring=keyring,
        signing=signing,
        sealer=Sealer(keyring.node_keys(), "n1", signing, clock=clock),
        log=log,
        catalog_url=catalog_url,
        catalog=catalog,
    )


def close_world(world: World) -> None:
    world.log.close()
    world.catalog.close()
    world.keyring.close()


@pytest.fixture(scope="session")
def catalog_template(postgres: Postgres) -> Iterator[str]:
    """The name of a database with an empty catalog. A copy of it is quicker than a fresh one."""
    url = postgres.create_database()
    Catalog.connect(url).close()
    yield url.rsplit("/", 1)[1]
    postgres.drop_database(url)


_numbers = count()


@contextmanager
def copies(server: Postgres, template: str) -> Iterator[Callable[[], str]]:
    """Makes a copy of the template at every call, and drops all of them in the end."""
    made: list[str] = []
    engine = sa.create_engine(server.url(), isolation_level="AUTOCOMMIT")

    def copy() -> str:
        made.append(server.url(f"catalog_{next(_numbers)}"))
        with engine.connect() as connection:
            name = made[-1].rsplit("/", 1)[1]
            connection.execute(sa.text(f"CREATE DATABASE {name} TEMPLATE {template}"))
        return made[-1]

    yield copy
    engine.dispose()
    for url in made:
        server.drop_database(url)


@pytest.fixture(params=DATABASES)
def new_catalog_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], str]]:
    """Where the next empty catalog is, or will be: once for each database."""
    if request.param == "sqlite":
        yield lambda: f"sqlite:///{tmp_path / f'catalog-{next(_numbers)}.db'}"
        return
    template = request.getfixturevalue("catalog_template")
    with copies(request.getfixturevalue("postgres"), template) as copy:
        yield copy


@pytest.fixture(params=DATABASES)
def bare_url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Where nothing is yet: no file, and a database without a table."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path / 'catalog.db'}"
        return
    server: Postgres = request.getfixturevalue("postgres")
    url = server.create_database()
    yield url
    server.drop_database(url)


@pytest.fixture
def postgres_catalog_url(postgres: Postgres, catalog_template: str) -> Iterator[str]:
    """Where one empty catalog is, in PostgreSQL."""
    with copies(postgres, catalog_template) as copy:
        yield copy()


@pytest.fixture
def catalog_url(new_catalog_url: Callable[[], str]) -> str:
    """Where one empty catalog is, or will be."""
    return new_catalog_url()


@pytest.fixture
def catalog(catalog_url: str) -> Iterator[Catalog]:
    opened = Catalog.connect(catalog_url)
    yield opened
    opened.close()


@pytest.fixture
def object_storage(s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> ObjectStorage:
    """An empty prefix of a bucket, with credentials in the environment."""
    log_in(s3_bucket, monkeypatch)
    url = f"s3://{s3_bucket.name}/some/shards"
    return ObjectStorage(url, endpoint=s3_bucket.endpoint, region="us-east-1")


def log_in(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the bucket's credentials where AWS tools look for them."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", bucket.options["access_key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", bucket.options["secret_key"])


@pytest.fixture(params=["directory", "bucket"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    """An empty storage: a directory that is not there yet, and a bucket."""
    if request.param == "directory":
        return LocalStorage(tmp_path / "some" / "shards")
    found: ObjectStorage = request.getfixturevalue("object_storage")
    return found


@pytest.fixture
def world(tmp_path: Path, catalog_url: str) -> Iterator[World]:
    made = make_world(tmp_path, catalog_url)
    yield made
    close_world(made)
