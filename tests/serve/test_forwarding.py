"""A node whose traces go to Kafka: while it serves, as it ends, and without any broker."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftkeep.config import Config
from draftkeep.errors import ConfigError
from draftkeep.ingest.kafka_topic import create_topic
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.serve import node as node_module
from draftkeep.serve.node import Node
from draftkeep.store.models.target import TargetModel
from tests.ingest.steady import arrived
from tests.services.kafka import Kafka

DAY_S = 86_400


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a node still holds at its end gets its try on a busy machine too."""
    monkeypatch.setattr(node_module, "DRAIN_TIMEOUT_S", 60)


def waiting(config: Config) -> int:
    """How many records are in the node's log."""
    first, end = SqliteLog.open_reader(config.log_path).bounds()
    return end - first


def test_what_a_node_captures_goes_to_kafka_to_the_last(
    kafka_broker: Kafka, kafka_topic: str, stations: Callable[..., Any]
) -> None:
    create_topic(kafka_broker.access, kafka_topic, partitions=2, replicas=1, ttl_s=DAY_S)
    kafka = {"servers": list(kafka_broker.access.servers), "topic": kafka_topic}
    station = stations(kafka=kafka)
    for _ in range(3):
        station.chat(max_tokens=2)
    node = station.node
    station.wait_for(lambda: node.stats().forwarding.forward.sent_records == 3)
    forwarding = station.admin("GET", "/admin/stats").json()["forwarding"]
    assert forwarding["cap_bytes"] == station.config.log.cap_bytes
    assert forwarding["forward"]["failures"] == 0
    station.chat(max_tokens=2)
    station.stop()
    assert waiting(station.config) == 0
    assert sorted(arrived(kafka_broker.access, kafka_topic).values()) == [1, 1, 1, 1]


def test_a_node_that_ends_without_brokers_leaves_its_log_to_the_next(
    kafka_broker: Kafka, kafka_topic: str, stations: Callable[..., Any]
) -> None:
    create_topic(kafka_broker.access, kafka_topic, partitions=2, replicas=1, ttl_s=DAY_S)
    away = stations(kafka={"servers": ["127.0.0.1:1"], "topic": kafka_topic, "deadline_s": 1})
    away.chat(max_tokens=2)
    away.stop()
    assert waiting(away.config) == 1
    kafka = {"servers": list(kafka_broker.access.servers), "topic": kafka_topic}
    back = stations(kafka=kafka)
    back.wait_for(lambda: back.node.stats().forwarding.forward.sent_records == 1)
    back.stop()
    assert waiting(back.config) == 0
    assert sorted(arrived(kafka_broker.access, kafka_topic).values()) == [1]


def test_without_brokers_in_the_configuration_nothing_is_forwarded(
    stations: Callable[..., Any],
) -> None:
    station = stations()
    station.chat(max_tokens=2)
    assert len(station.captured()) == 1
    assert station.admin("GET", "/admin/stats").json()["forwarding"] is None
    assert "draftkeep_spool" not in station.node.exposition.render().decode()


def test_a_password_that_cannot_be_read_refuses_the_start(
    tmp_path: Path, fresh_target: Callable[[], TargetModel]
) -> None:
    config = Config.model_validate(
        {
            "state_dir": tmp_path,
            "kafka": {
                "servers": ["127.0.0.1:1"],
                "ca_file": tmp_path / "ca.pem",
                "username": "node",
                "password_file": tmp_path / "nothing",
            },
        }
    )
    with pytest.raises(ConfigError, match="password_file"):
        Node(config, fresh_target())
