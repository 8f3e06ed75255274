"""Forwarding while brokers hang, die and are cut off: nothing is lost, and nobody is held up."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftkeep.ingest.kafka_topic import create_topic
from draftkeep.ingest.sqlite_log import SqliteLog
from tests.ingest.steady import RATE_PER_S, Steady, arrived, resident_bytes, wait_for
from tests.services.kafka import Kafka

DAY_S = 86_400
OUTAGE_S = 60
# A call that waited for the brokers would take thousands of times as long.
SLOWER = 30
GROWTH_BYTES = 40 * 1024**2
CAP_BYTES = 5 * 1024**2


@pytest.fixture
def steady(tmp_path: Path, bench: Any, kafka_topic: str) -> Iterator[Callable[..., Steady]]:
    """Starts the traffic against a cluster whose topic it makes."""
    made: list[Steady] = []
    logs: list[SqliteLog] = []

    def start(kafka: Kafka, *, deadline_s: float = 2.0, cap_bytes: int = 2**30) -> Steady:
        replicas = len(kafka.nodes)
        create_topic(kafka.access, kafka_topic, partitions=3, replicas=replicas, ttl_s=DAY_S)
        log = SqliteLog(tmp_path / "spool", cap_bytes=cap_bytes, bucket_s=600, clock=time.time)
        logs.append(log)
        steady = Steady(
            log,
            bench.emitter,
            kafka.access,
            kafka_topic,
            trace=bench.trace(1, positions=60, k=32),
            provenance=bench.provenance,
            deadline_s=deadline_s,
        )
        made.append(steady)
        steady.start()
        steady.forwards()
        return steady

    yield start
    for one in made:
        one.end()
    for log in logs:
        log.close()


def check_all_arrived(steady: Steady, kafka: Kafka, topic: str, bench: Any) -> None:
    """Stop, and find every acknowledged trace in Kafka."""
    steady.stop()
    acknowledged = set(bench.witness.acknowledged)
    found = arrived(kafka.access, topic)
    assert acknowledged <= set(found)
    assert set(found) <= acknowledged
    assert steady.emitter.counts()["log_failed"] == 0


def test_a_broker_frozen_past_the_deadline(
    kafka_broker: Kafka, kafka_topic: str, bench: Any, steady: Callable[..., Steady]
) -> None:
    traffic = steady(kafka_broker, deadline_s=10)
    wait_for(lambda: len(traffic.offers_s) > 600)
    (node,) = kafka_broker.nodes
    before_s, offers, resident = traffic.offer_p99_s(), len(traffic.offers_s), resident_bytes()
    node.freeze()
    wait_for(lambda: len(traffic.offers_s) > offers + OUTAGE_S * RATE_PER_S, timeout_s=600)
    grown = resident_bytes() - resident
    during_s = traffic.offer_p99_s(offers)
    stats = traffic.forwarder.stats()
    node.thaw()
    traffic.forwards()
    assert stats.failures >= 2
    assert stats.oldest_s > 10
    assert 0 < stats.waiting <= traffic.emitter.acknowledged
    # One that waited for the broker would take up to the deadline of 10 s.
    assert during_s < max(SLOWER * before_s, 1.0)
    assert grown < GROWTH_BYTES
    check_all_arrived(traffic, kafka_broker, kafka_topic, bench)
    assert sum(traffic.emitter.counts().values()) == 0


def test_a_broker_killed_and_restarted(
    kafka_broker: Kafka, kafka_topic: str, bench: Any, steady: Callable[..., Steady]
) -> None:
    traffic = steady(kafka_broker)
    (node,) = kafka_broker.nodes
    node.kill()
    wait_for(lambda: traffic.forwarder.stats().failures > 0)
    kafka_broker.restart(node)
    traffic.forwards()
    check_all_arrived(traffic, kafka_broker, kafka_topic, bench)


def test_a_network_cut_and_slow(
    kafka_cluster: Callable[..., Kafka],
    kafka_topic: str,
    bench: Any,
    steady: Callable[..., Steady],
) -> None:
    kafka = kafka_cluster(proxied=True)
    traffic = steady(kafka)
    (proxy,) = kafka.proxies
    threads = threading.active_count()
    proxy.cut()
    wait_for(lambda: traffic.forwarder.stats().failures >= 2)
    proxy.heal()
    traffic.forwards()
    # Slower than what comes, so that groups miss their deadline.
    proxy.slow(bytes_per_s=100_000, delay_s=0.05)
    failures = traffic.forwarder.stats().failures
    wait_for(lambda: traffic.forwarder.stats().failures > failures)
    proxy.heal()
    traffic.forwards()
    # Clients that missed their deadlines left none behind.
    wait_for(lambda: threading.active_count() <= threads)
    check_all_arrived(traffic, kafka, kafka_topic, bench)


def test_a_leader_of_three_killed(
    kafka_cluster: Callable[..., Kafka],
    kafka_topic: str,
    bench: Any,
    steady: Callable[..., Steady],
) -> None:
    kafka = kafka_cluster(nodes=3)
    traffic = steady(kafka, deadline_s=8)
    # Each of them leads one of the three partitions.
    kafka.nodes[0].kill()
    traffic.forwards()
    check_all_arrived(traffic, kafka, kafka_topic, bench)


def test_a_full_log_refuses_loudly_and_recovers(
    kafka_broker: Kafka, kafka_topic: str, bench: Any, steady: Callable[..., Steady]
) -> None:
    traffic = steady(kafka_broker, cap_bytes=CAP_BYTES)
    (node,) = kafka_broker.nodes
    node.freeze()
    wait_for(lambda: bench.witness.count("log_full") > 0)
    assert traffic.log.size_bytes() <= CAP_BYTES
    node.thaw()
    before = traffic.emitter.acknowledged
    wait_for(lambda: traffic.emitter.acknowledged > before + 200)
    check_all_arrived(traffic, kafka_broker, kafka_topic, bench)
    counts = traffic.emitter.counts()
    assert len(traffic.offers_s) == traffic.emitter.acknowledged + sum(counts.values())
