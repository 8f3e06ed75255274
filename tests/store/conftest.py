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

from draftkeep.ingest.envelope import signed_message
from draftkeep.ingest.record import SealedTrace
from draftkeep.ingest.trace import Provenance
from draftkeep.store.catalog import Catalog
from draftkeep.store.reader import iter_sealed
from draftkeep.store.shard_writer import Row
from draftkeep.store.storage import Storage
from draftkeep.store.storage_local import LocalStorage
from draftkeep.store.storage_objects import ObjectStorage
from tests.clock import Clock
from tests.deployment import START_S, Deployment
from tests.services.postgres import Postgres
from tests.services.s3 import Bucket

TARGET = b"T" * 32
TENANTS = ("acme", "birch")
DATABASES = ("sqlite", "postgresql")


@dataclass(kw_only=True)
class World(Deployment):
    """One node and everything behind it. `seal` makes real sealed traces."""

    rng: random.Random = field(default_factory=lambda: random.Random(7))

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
        return self.seal_as(self.provenance(**changes), body, prompt_tokens=3, positions=5)

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
    return World.open(root, clock=Clock(now_s), tenants=TENANTS, catalog_url=catalog_url)


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
    made.close()
