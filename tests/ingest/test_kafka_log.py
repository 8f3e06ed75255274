"""The log on a real broker: outages, limits, topics that were made again, and deadlines."""

import math
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from kafka import KafkaProducer
from kafka.producer.future import FutureRecordMetadata

from draftkeep.errors import LogFullError, StoreError
from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.ingest.kafka_log import KafkaLog
from draftkeep.ingest.kafka_retention import TopicRetention, read_retention
from draftkeep.ingest.kafka_topic import create_topic, topic_settings
from draftkeep.ingest.kafka_writer import KafkaWriter
from tests.ingest.steady import wait_for
from tests.services.broker_properties import FAST_RETENTION, SHORT_LIVED, Scram
from tests.services.kafka import Kafka

DAY_S = 86_400
EVERYTHING = (10**6, 10**9)
DEADLINE_S = 3.0


@pytest.fixture
def topic(kafka_broker: Kafka, kafka_topic: str) -> str:
    create_topic(kafka_broker.access, kafka_topic, partitions=2, replicas=1, ttl_s=DAY_S)
    return kafka_topic


@pytest.fixture
def log(kafka_broker: Kafka, topic: str) -> Iterator[KafkaLog]:
    access = replace(kafka_broker.access, patience_s=DEADLINE_S)
    log = KafkaLog(access, topic, deadline_s=DEADLINE_S, budget_bytes=200_000)
    yield log
    log.close()


def remake(access: KafkaAccess, topic: str) -> None:
    with access.admin() as admin:
        admin.delete_topics([topic])
    create_topic(access, topic, partitions=2, replicas=1, ttl_s=DAY_S)


def test_a_frozen_broker_costs_an_append_its_deadline_and_no_more(
    kafka_broker: Kafka, log: KafkaLog
) -> None:
    log.append([b"before"])
    (node,) = kafka_broker.nodes
    node.freeze()
    with pytest.raises(StoreError, match="did not acknowledge 1 records"):
        log.append([b"during"])
    with pytest.raises(StoreError):
        log.append([b"again"])
    with pytest.raises(StoreError):
        log.read(0, *EVERYTHING)
    node.thaw()
    log.append([b"after"])
    found = [record.data for record in log.read(0, *EVERYTHING)]
    # What was not acknowledged may be there or not; what was, is.
    assert {b"before", b"after"} <= set(found)


def test_what_waits_for_a_broker_is_bounded(kafka_broker: Kafka, log: KafkaLog) -> None:
    log.append([b"before"])
    (node,) = kafka_broker.nodes
    node.freeze()
    try:
        with ThreadPoolExecutor(8) as pool:
            outcomes = [pool.submit(log.append, [b"x" * 90_000]) for _ in range(8)]
        errors = [type(outcome.exception()) for outcome in outcomes]
    finally:
        node.thaw()
    assert errors.count(LogFullError) >= 5
    assert errors.count(LogFullError) + errors.count(StoreError) == 8
    log.append([b"after"])


def test_appends_go_on_after_a_kill(kafka_broker: Kafka, log: KafkaLog) -> None:
    (node,) = kafka_broker.nodes
    acknowledged: list[bytes] = []
    stop = threading.Event()

    def append() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            try:
                log.append([str(number).encode()])
            except StoreError:
                continue
            acknowledged.append(str(number).encode())

    with ThreadPoolExecutor(1) as pool:
        appending = pool.submit(append)
        try:
            node.until(lambda: len(acknowledged) > 50, 30)
            node.kill()
            kafka_broker.restart(node)
            after = len(acknowledged)
            node.until(lambda: len(acknowledged) > after + 50, 30)
        finally:
            stop.set()
        appending.result()
    found = [record.data for record in log.read(0, *EVERYTHING)]
    assert set(acknowledged) <= set(found)


def test_a_cut_network_costs_an_append_its_deadline_and_heals(
    kafka_cluster: Callable[..., Kafka], kafka_topic: str
) -> None:
    kafka = kafka_cluster(proxied=True)
    create_topic(kafka.access, kafka_topic, partitions=1, replicas=1, ttl_s=DAY_S)
    access = replace(kafka.access, patience_s=DEADLINE_S)
    log = KafkaLog(access, kafka_topic, deadline_s=DEADLINE_S)
    log.append([b"before"])
    (proxy,) = kafka.proxies
    proxy.cut()
    for _ in range(2):
        with pytest.raises(StoreError):
            log.append([b"during"])
    proxy.heal()
    log.append([b"after"])
    proxy.slow(bytes_per_s=50_000, delay_s=0.05)
    log.append([b"slow" * 10_000])
    found = [record.data for record in log.read(0, *EVERYTHING)]
    assert {b"before", b"after", b"slow" * 10_000} <= set(found)
    log.close()


def test_a_topic_made_again_is_noticed(kafka_broker: Kafka, topic: str, log: KafkaLog) -> None:
    log.append([b"old"] * 3)
    before = log.identity()
    remake(kafka_broker.access, topic)
    again = KafkaLog(kafka_broker.access, topic)
    again.append([b"new"] * 5)
    again.close()
    with pytest.raises(StoreError, match="made again"):
        log.read(1, *EVERYTHING)
    with pytest.raises(StoreError, match="made again"):
        log.free(1)
    after = log.identity()
    assert before[0] == after[0]
    assert before[1] != after[1]


def test_partitions_are_logs_of_their_own(kafka_broker: Kafka, topic: str, log: KafkaLog) -> None:
    other = KafkaLog(kafka_broker.access, topic, partition=1)
    other.append([b"a", b"b"])
    assert log.bounds() == (0, 0)
    assert other.identity() == (*log.identity()[:2], 1)
    other.close()


def test_what_expired_is_passed_over(kafka_broker: Kafka, kafka_topic: str) -> None:
    create_topic(
        kafka_broker.access,
        kafka_topic,
        partitions=1,
        replicas=1,
        ttl_s=DAY_S,
        overrides=SHORT_LIVED,
    )
    log = KafkaLog(kafka_broker.access, kafka_topic)
    log.append([b"old"] * 3)
    kafka_broker.nodes[0].until(lambda: log.bounds() == (3, 3), 30)
    assert log.append([b"new"]) == 3
    assert [record.offset for record in log.read(0, *EVERYTHING)] == [3]
    log.close()


def transact(kafka: Kafka, topic: str, *records: bytes, commit: bool = True) -> None:
    """Write to partition 0 as a producer of transactions does; its end takes an offset."""
    producer = kafka.access.connect(
        KafkaProducer, enable_idempotence=True, acks="all", transactional_id=f"t-{topic}"
    )
    producer.init_transactions()
    producer.begin_transaction()
    for record in records:
        producer.send(topic, record, partition=0)
    producer.flush()
    if commit:
        producer.commit_transaction()
    else:
        producer.abort_transaction()
    producer.close()


def test_the_end_of_a_transaction_is_passed_over(
    kafka_broker: Kafka, topic: str, log: KafkaLog
) -> None:
    (node,) = kafka_broker.nodes
    transact(kafka_broker, topic, b"a", b"b")
    node.until(lambda: log.bounds() == (0, 3), 30)
    assert [record.offset for record in log.read(0, *EVERYTHING)] == [0, 1]
    # Nothing follows, and that is no failure of the broker.
    assert log.read(2, *EVERYTHING) == []
    log.append([b"c"])
    transact(kafka_broker, topic, b"d", commit=False)
    node.until(lambda: log.bounds() == (0, 6), 30)
    log.append([b"e"])
    found = {record.offset: record.data for record in log.read(0, 3, 10**6)}
    assert found == {0: b"a", 1: b"b", 3: b"c"}
    assert [record.offset for record in log.read(5, *EVERYTHING)] == [6]
    assert [record.offset for record in log.read(2, 1, 10**6)] == [3]


def test_a_slow_network_brings_what_it_brought_by_the_deadline(
    kafka_cluster: Callable[..., Kafka], kafka_topic: str
) -> None:
    kafka = kafka_cluster(proxied=True)
    create_topic(kafka.access, kafka_topic, partitions=1, replicas=1, ttl_s=DAY_S)
    # Twice what the first answer takes to come, and less than all of them do.
    log = KafkaLog(kafka.access, kafka_topic, deadline_s=2 * DEADLINE_S)
    for _ in range(40):
        log.append([b"x" * 100_000] * 10)
    (proxy,) = kafka.proxies
    proxy.slow(bytes_per_s=3_000_000, delay_s=0.0)
    position = 0
    while position < 400:
        records = log.read(position, *EVERYTHING)
        assert records[0].offset == position
        position = records[-1].offset + 1
    log.close()


def test_a_forked_child_uses_no_client_of_its_parent(kafka_broker: Kafka, topic: str) -> None:
    log = KafkaLog(kafka_broker.access, topic)
    log.append([b"before"])
    calls: tuple[Callable[[], object], ...] = (
        log.bounds,
        log.identity,
        lambda: log.append([b"x"]),
        lambda: log.read(0, 1, 1),
    )
    child = os.fork()
    if child == 0:
        refused = 0
        for call in calls:
            try:
                call()
            except StoreError as error:
                refused += "forked" in str(error)
        log.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(calls)
    log.append([b"after"])
    assert [record.data for record in log.read(0, *EVERYTHING)] == [b"before", b"after"]
    log.close()


@pytest.mark.parametrize("where", ["send", "answer"])
def test_a_fault_of_the_library_costs_no_budget(
    kafka_broker: Kafka, topic: str, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    writer = KafkaWriter(kafka_broker.access, topic, budget_bytes=200_000, deadline_s=DEADLINE_S)
    record = b"x" * 90_000
    writer.append([record], partition=0)

    def faulty(*_: object, **__: object) -> None:
        raise RuntimeError("a fault")

    with monkeypatch.context() as patch:
        if where == "send":
            patch.setattr(KafkaProducer, "send", faulty)
        else:
            patch.setattr(FutureRecordMetadata, "get", faulty)
        for _ in range(5):
            with pytest.raises(StoreError, match="RuntimeError"):
                writer.append([record], partition=0)
    writer.append([record, record], partition=0)
    writer.close()


def test_a_topic_that_is_not_there_is_named_and_no_connection_kept(kafka_broker: Kafka) -> None:
    before = set(threading.enumerate())
    with pytest.raises(StoreError, match="there is no topic nowhere"):
        KafkaLog(kafka_broker.access, "nowhere")
    wait_for(lambda: set(threading.enumerate()) <= before)


def test_only_who_knows_the_password_gets_in(
    kafka_cluster: Callable[..., Kafka], kafka_scram: Scram, kafka_topic: str
) -> None:
    kafka = kafka_cluster(scram=kafka_scram)
    create_topic(kafka.access, kafka_topic, partitions=1, replicas=1, ttl_s=DAY_S)
    log = KafkaLog(kafka.access, kafka_topic)
    log.append([b"over TLS"])
    assert [record.data for record in log.read(0, *EVERYTHING)] == [b"over TLS"]
    log.close()
    stranger = replace(kafka.access, password="wrong", patience_s=2)
    with pytest.raises(StoreError, match="login settings") as caught:
        KafkaLog(stranger, kafka_topic)
    assert "wrong" not in str(caught.value)


class TestRetention:
    def test_a_topic_of_ours_keeps_its_deadline(self, kafka_broker: Kafka, topic: str) -> None:
        retention = read_retention(kafka_broker.access, topic)
        check_ms = int(FAST_RETENTION["log.retention.check.interval.ms"])
        assert retention.check_ms == check_ms
        assert retention.worst_case_age_s == 22 * 3600 + 3600 + check_ms / 1000 + 60
        assert retention.problems(DAY_S) == []
        (problem,) = retention.problems(3600)
        assert "can get 82861 s old" in problem

    def test_a_topic_by_default_keeps_none(self, kafka_broker: Kafka, kafka_topic: str) -> None:
        with kafka_broker.access.admin() as admin:
            admin.create_topics(
                {kafka_topic: {"num_partitions": 1, "configs": {"retention.ms": "-1"}}},
                wait_for_metadata=True,
            )
        retention = read_retention(kafka_broker.access, kafka_topic)
        assert retention.worst_case_age_s == math.inf
        assert [problem.split()[0] for problem in retention.problems(DAY_S)] == [
            "retention.ms",
            "message.timestamp.type",
        ]

    @pytest.mark.parametrize("ttl_s", [4, 3600, DAY_S, 365 * DAY_S])
    def test_settings_leave_room_for_the_brokers(self, ttl_s: int) -> None:
        settings = topic_settings(ttl_s=ttl_s, replicas=3)
        retention = TopicRetention(
            retention_ms=int(settings["retention.ms"]),
            segment_ms=int(settings["segment.ms"]),
            check_ms=0,
            delete_delay_ms=int(settings["file.delete.delay.ms"]),
            append_time=True,
            deletes=True,
            tiered=False,
        )
        assert 0.9 * ttl_s <= retention.worst_case_age_s < ttl_s
        assert settings["min.insync.replicas"] == "2"
