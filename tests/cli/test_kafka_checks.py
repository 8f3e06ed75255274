"""Doctor's Kafka checks on a real broker, and every reason why one lets nobody in."""

import datetime
import logging
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaAdminClient

from draftkeep.cli.doctor.finding import Finding
from draftkeep.cli.doctor.run import examine
from draftkeep.config import CatalogConfig, Config, KafkaConfig, RetentionConfig
from draftkeep.errors import StoreError
from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.ingest.kafka_topic import create_topic
from draftkeep.store.catalog import Catalog
from tests.services.broker_properties import Scram
from tests.services.certificates import write_certificates
from tests.services.kafka import Kafka
from tests.store.deletions import House

DAY_S = 86_400


@pytest.fixture
def catalog(tmp_path: Path) -> Catalog:
    return Catalog.open(tmp_path / "state" / "catalog.db")


@pytest.fixture
def house(kafka_broker: Kafka, kafka_topic: str, catalog: Catalog) -> House:
    return House(access=kafka_broker.access, name=kafka_topic, catalog=catalog)


def configured(house: House, tmp_path: Path, **changes: object) -> Config:
    access = house.access
    values = {
        "servers": access.servers,
        "topic": house.name,
        "ca_file": access.ca_file,
        "username": access.username,
        "password": access.password,
        "deadline_s": 15,
    }
    settings = KafkaConfig(**{**values, **changes})  # type: ignore[arg-type]
    retention = RetentionConfig(ttl_s=DAY_S)
    return Config(state_dir=tmp_path / "state", kafka=settings, retention=retention)


def kafka_findings(config: Config) -> dict[str, Finding]:
    """Doctor's, without the models."""
    quick = config.model_copy(update={"model": config.model.model_copy(update={"target": "none"})})
    names = ("brokers", "topic", "deadline", "lag")
    return {item.check: item for item in examine(quick) if item.check in names}


class TestDoctor:
    def test_a_good_topic(self, house: House, tmp_path: Path) -> None:
        house.make()
        house.append(0, 3)
        found = kafka_findings(configured(house, tmp_path))
        assert [item.status for item in found.values()] == ["ok"] * 4
        assert found["lag"].detail.startswith("3 records wait")
        house.close()

    def test_a_database_without_a_catalog_yet_is_what_the_first_doctor_meets(
        self, house: House, tmp_path: Path, postgres_url: str
    ) -> None:
        house.make()
        config = configured(house, tmp_path)
        url = postgres_url.replace("+psycopg", "")
        fresh = config.model_copy(update={"catalog": CatalogConfig(url=url)})
        assert [item.status for item in kafka_findings(fresh).values()] == ["ok"] * 4
        catalog = next(item for item in examine(fresh) if item.check == "catalog")
        assert catalog.status == "ok"
        assert re.match("no catalog at postgresql://[^;]* yet; ", catalog.detail)
        house.close()

    def test_a_catalog_that_is_away_hides_the_lag_alone(self, house: House, tmp_path: Path) -> None:
        house.make()
        away = CatalogConfig(url="postgresql://nobody@127.0.0.1:1/nothing")
        config = configured(house, tmp_path).model_copy(update={"catalog": away})
        found = kafka_findings(config)
        assert [item.status for item in found.values()] == ["ok", "ok", "ok", "warn"]
        assert found["lag"].remedy == "mend the catalog first"
        house.close()

    def test_without_servers_nobody_asks(self, tmp_path: Path) -> None:
        assert kafka_findings(Config(state_dir=tmp_path)) == {}

    def test_a_topic_that_is_not_there(self, house: House, tmp_path: Path) -> None:
        found = kafka_findings(configured(house, tmp_path))
        assert found["topic"].remedy == "draftkeep topic create"

    def test_a_topic_made_again(self, house: House, tmp_path: Path) -> None:
        house.make()
        house.commit(0, 0)
        house.make()
        found = kafka_findings(configured(house, tmp_path))
        assert (found["topic"].status, "forget-log" in found["topic"].remedy) == ("fail", True)
        house.close()

    @pytest.mark.parametrize(
        ("settings", "check", "status", "said"),
        [
            ({"retention.ms": "-1"}, "deadline", "fail", "unlimited"),
            ({"message.timestamp.type": "CreateTime"}, "deadline", "fail", "LogAppendTime"),
            ({"retention.ms": str(DAY_S * 1000)}, "deadline", "fail", "shorten retention.ms"),
            ({"cleanup.policy": "compact"}, "deadline", "fail", "cleanup.policy"),
            ({"min.insync.replicas": "2"}, "topic", "fail", "nothing is ever acknowledged"),
            ({"max.message.bytes": "500000"}, "topic", "fail", "a record has up to"),
            ({"compression.type": "zstd"}, "topic", "warn", "uncompressed"),
        ],
    )
    def test_a_setting_that_will_not_do(
        self,
        house: House,
        tmp_path: Path,
        settings: dict[str, str],
        check: str,
        status: str,
        said: str,
    ) -> None:
        create_topic(
            house.access, house.name, partitions=1, replicas=1, ttl_s=DAY_S, overrides=settings
        )
        finding = kafka_findings(configured(house, tmp_path))[check]
        assert finding.status == status
        assert said in f"{finding.detail} {finding.remedy}"
        assert finding.remedy

    def test_records_that_wait_too_long(
        self, house: House, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        house.make()
        house.append(1, 3)
        config = configured(house, tmp_path)
        later_s = time.time() + 3 * 3600
        monkeypatch.setattr("draftkeep.cli.doctor.kafka_checks.time.time", lambda: later_s)
        found = kafka_findings(config)["lag"]
        assert (found.status, found.remedy[:21]) == ("warn", "run draftkeep compact")
        house.close()


class OtherMechanism(KafkaAccess):
    """A client that asks for a login which the brokers do not offer."""

    def options(self) -> dict[str, Any]:
        return {**super().options(), "sasl_mechanism": "PLAIN"}


def test_over_tls_and_scram_everything_works_and_says_why_it_does_not(
    kafka_cluster: Callable[..., Kafka],
    kafka_scram: Scram,
    kafka_topic: str,
    tmp_path: Path,
    catalog: Catalog,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    kafka = kafka_cluster(scram=kafka_scram)
    house = House(access=kafka.access, name=kafka_topic, catalog=catalog)
    good = configured(house, tmp_path)
    assert KafkaAccess.configured(good.kafka).username == kafka_scram.username
    house.make()
    house.append(0, 4)
    house.commit(0, 4)
    assert len(house.logs[0].read(0, 99, 10**6)) == 4
    house.logs[0].free(2)
    assert house.firsts() == [2, 0]
    assert [item.status for item in kafka_findings(good).values()] == ["ok"] * 4
    house.round("compacted")
    assert house.firsts() == [4, 0]
    house.close()
    wrong_secret = secrets.token_hex(8)
    # The broker hangs up right after it has said so, and may be quicker than the library.
    login = "Authentication failed|during the login"
    now = datetime.datetime.now(datetime.UTC)
    other_ca = write_certificates(tmp_path, now=now).authority
    cases: dict[str, tuple[dict[str, object], str]] = {
        "password": ({"password": wrong_secret}, login),
        "user": ({"username": "nobody"}, login),
        "authority": ({"ca_file": other_ca}, "certificate verify failed"),
        "plain": ({"ca_file": None, "username": None, "password": None}, "wants TLS"),
        "no login": ({"username": None, "password": None}, "wants a login"),
        "no route": ({"servers": ("127.0.0.1:1",)}, "ECONNREFUSED"),
    }
    for name, (changes, reason) in cases.items():
        found = kafka_findings(configured(house, tmp_path, **{**changes, "deadline_s": 5}))
        assert list(found) == ["brokers"], name
        assert found["brokers"].status == "fail"
        assert re.search(reason, found["brokers"].detail), (name, found["brokers"].detail)
        said = found["brokers"].detail + found["brokers"].remedy
        assert wrong_secret not in said
        assert kafka_scram.password not in said
    other = OtherMechanism(
        servers=house.access.servers,
        ca_file=house.access.ca_file,
        username=kafka_scram.username,
        password=kafka_scram.password,
        patience_s=3,
    )
    with pytest.raises(StoreError, match="echanism"):
        other.connect(KafkaAdminClient)
    assert wrong_secret not in caplog.text
    assert kafka_scram.password not in caplog.text
