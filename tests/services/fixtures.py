"""Fixtures for the services: one server of each kind for every pytest process that asks."""

import datetime
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.services.broker_properties import FAST_RETENTION, Scram
from tests.services.certificates import write_certificates
from tests.services.jars import kafka_needs
from tests.services.kafka import Kafka, running_kafka
from tests.services.needs import POSTGRESQL
from tests.services.postgres import Postgres, running_postgres
from tests.services.s3 import S3, Bucket, running_s3
from tests.services.skips import require


@pytest.fixture(scope="session")
def _kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kafka]:
    require(kafka_needs())
    with running_kafka(tmp_path_factory.mktemp("kafka"), extra=FAST_RETENTION) as kafka:
        yield kafka


@pytest.fixture
def kafka_broker(_kafka: Kafka) -> Iterator[Kafka]:
    """One broker that all tests of this process share; use topics of your own (`kafka_topic`).

    A test may freeze, kill and stop its node: it is mended before the next test. It looks for
    expired segments every second (see `SHORT_LIVED`).
    """
    yield _kafka
    _kafka.mend()


@pytest.fixture
def kafka_topic() -> str:
    """A topic name that nobody used."""
    return f"test-{secrets.token_hex(6)}"


@pytest.fixture
def kafka_cluster(tmp_path: Path) -> Iterator[Callable[..., Kafka]]:
    """Start clusters of the test's own: `kafka_cluster(nodes=3, scram=..., extra={...})`."""
    require(kafka_needs())
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(
            running_kafka(tmp_path / f"kafka-{secrets.token_hex(4)}", **options)
        )


@pytest.fixture(scope="session")
def kafka_scram(tmp_path_factory: pytest.TempPathFactory) -> Scram:
    """A user, a password and certificates for `kafka_cluster(scram=...)`."""
    certificates = write_certificates(
        tmp_path_factory.mktemp("certificates"), now=datetime.datetime.now(datetime.UTC)
    )
    return Scram(username="draftkeep", password=secrets.token_hex(16), certificates=certificates)


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """One server, without fsync, that all tests of this process share."""
    require([POSTGRESQL])
    with running_postgres() as server:
        yield server


@pytest.fixture
def postgres_url(postgres: Postgres) -> Iterator[str]:
    """The SQLAlchemy URL of a fresh database, dropped after the test."""
    url = postgres.create_database()
    yield url
    postgres.drop_database(url)


@pytest.fixture(scope="session")
def _s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3]:
    with running_s3(tmp_path_factory.mktemp("s3") / "log") as server:
        yield server


@pytest.fixture
def s3_bucket(_s3: S3) -> Bucket:
    """A fresh bucket."""
    return _s3.create_bucket()
