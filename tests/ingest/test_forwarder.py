"""Forwarding, one fault at a time: crashes, refusals, wrong topics, and any sequence of them."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from kafka.admin import ConfigResource

from draftkeep.errors import StoreError
from draftkeep.ingest.forwarder import Forwarder
from draftkeep.ingest.kafka_topic import create_topic
from draftkeep.ingest.kafka_writer import KafkaWriter
from draftkeep.ingest.record import encode_record, peek_trace_id
from draftkeep.ingest.sqlite_log import SqliteLog
from tests.clock import Clock
from tests.ingest.conftest import run_child
from tests.ingest.steady import arrived, drained, wait_for
from tests.services.kafka import Kafka

DAY_S = 86_400
BUDGET_BYTES = 8 * 1024**2
DEADLINE_S = 3.0


@pytest.fixture
def log(open_log: Callable[..., SqliteLog]) -> Iterator[SqliteLog]:
    log = open_log()
    yield log
    log.close()


@pytest.fixture
def forwarder(
    kafka_broker: Kafka, kafka_topic: str, log: SqliteLog, clock: Clock
) -> Iterator[Forwarder]:
    """From `log` to a topic that the test makes."""
    writer = KafkaWriter(
        kafka_broker.access, kafka_topic, budget_bytes=BUDGET_BYTES, deadline_s=DEADLINE_S
    )
    yield Forwarder(log, writer, budget_bytes=BUDGET_BYTES, clock=clock)
    writer.close(1)


@pytest.fixture
def records(bench: Any) -> list[bytes]:
    """Forty sealed traces."""
    sealed = (
        bench.sealer.seal(b"body %d" % number, bench.provenance(), prompt_tokens=1, positions=1)
        for number in range(40)
    )
    return [encode_record(one) for one in sealed]


def make_topic(kafka: Kafka, topic: str, **overrides: str) -> None:
    create_topic(kafka.access, topic, partitions=3, replicas=1, ttl_s=DAY_S, overrides=overrides)


def ids(records: Sequence[bytes]) -> Counter[bytes | None]:
    return Counter(peek_trace_id(record) for record in records)


class TestRecords:
    def test_all_arrive_once_and_leave_the_log(
        self,
        kafka_broker: Kafka,
        kafka_topic: str,
        log: SqliteLog,
        forwarder: Forwarder,
        records: list[bytes],
    ) -> None:
        make_topic(kafka_broker, kafka_topic)
        log.append(records)
        forwarder.drain()
        assert arrived(kafka_broker.access, kafka_topic) == ids(records)
        assert log.bounds() == (40, 40)
        log.append(records[:5])
        forwarder.drain()
        stats = forwarder.stats()
        assert (stats.sent_records, stats.waiting, stats.failures) == (45, 0, 0)
        assert stats.oldest_s == 0.0
        assert stats.sent_bytes == sum(map(len, records + records[:5]))
        assert stats.log_bytes == log.size_bytes()

    def test_one_that_cannot_be_read_goes_on_with_the_others(
        self,
        kafka_broker: Kafka,
        kafka_topic: str,
        log: SqliteLog,
        forwarder: Forwarder,
        records: list[bytes],
    ) -> None:
        make_topic(kafka_broker, kafka_topic)
        log.append([b"", b"\x02 of another version", *records])
        forwarder.drain()
        assert arrived(kafka_broker.access, kafka_topic) == ids(records) + Counter({None: 2})

    def test_those_that_fill_the_budget_go_one_by_one(
        self, kafka_broker: Kafka, kafka_topic: str, log: SqliteLog, clock: Clock
    ) -> None:
        make_topic(kafka_broker, kafka_topic)
        log.append([os.urandom(900_000) for _ in range(4)])
        writer = KafkaWriter(
            kafka_broker.access, kafka_topic, budget_bytes=2**20, deadline_s=DEADLINE_S
        )
        forwarder = Forwarder(log, writer, budget_bytes=2**20, clock=clock)
        forwarder.drain()
        writer.close()
        assert (forwarder.stats().sent_records, forwarder.stats().failures) == (4, 0)
        assert log.bounds() == (4, 4)

    def test_the_trace_id_is_where_the_header_has_it(self, records: list[bytes]) -> None:
        for record in records:
            head = record.index(b"\x96\x01\x50")
            assert peek_trace_id(record) == record[head + 3 : head + 19]
            assert peek_trace_id(record[: head + 18]) is None


class TestRefusals:
    """Whatever is wrong with the topic, it is said, the log keeps all, and mending it is enough."""

    def test_a_topic_that_is_not_there_yet(
        self,
        kafka_broker: Kafka,
        kafka_topic: str,
        log: SqliteLog,
        forwarder: Forwarder,
        records: list[bytes],
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        log.append(records)
        stop = threading.Event()
        running = threading.Thread(target=forwarder.run, args=(stop,))
        running.start()
        try:
            wait_for(lambda: forwarder.stats().failures > 0)
            assert log.bounds() == (0, 40)
            make_topic(kafka_broker, kafka_topic)
            wait_for(lambda: log.bounds() == (40, 40))
        finally:
            stop.set()
            running.join()
        assert set(arrived(kafka_broker.access, kafka_topic)) == set(ids(records))
        said = [record.getMessage() for record in caplog.records if "draftkeep" in record.name]
        assert "forwarding to Kafka fails" in said[0]
        assert kafka_topic in said[0]
        assert "works again" in said[1]

    def test_a_topic_that_takes_too_little(
        self,
        kafka_broker: Kafka,
        kafka_topic: str,
        log: SqliteLog,
        forwarder: Forwarder,
        records: list[bytes],
    ) -> None:
        make_topic(kafka_broker, kafka_topic, **{"max.message.bytes": "20000"})
        large = records[0][:200] + os.urandom(30_000)
        log.append([*records[1:10], large, *records[10:]])
        for _ in range(3):
            with pytest.raises(StoreError, match=r"max\.message\.bytes to 2097152"):
                forwarder.drain()
        assert log.bounds() == (0, 40)
        with kafka_broker.access.admin() as admin:
            resource = ConfigResource("TOPIC", kafka_topic, {"max.message.bytes": "2097152"})
            admin.alter_configs([resource])
        wait_for(lambda: drained(forwarder))
        # The others were acknowledged at the first try and not sent again.
        assert arrived(kafka_broker.access, kafka_topic) == ids(records)

    def test_a_topic_made_again_gets_what_comes(
        self,
        kafka_broker: Kafka,
        kafka_topic: str,
        log: SqliteLog,
        forwarder: Forwarder,
        records: list[bytes],
    ) -> None:
        make_topic(kafka_broker, kafka_topic)
        log.append(records[:10])
        forwarder.drain()
        with kafka_broker.access.admin() as admin:
            admin.delete_topics([kafka_topic])
        make_topic(kafka_broker, kafka_topic)
        log.append(records[10:])
        wait_for(lambda: drained(forwarder))
        assert set(arrived(kafka_broker.access, kafka_topic)) == set(ids(records[10:]))


class TestDuplicates:
    def test_two_at_once_lose_nothing(
        self,
        kafka_broker: Kafka,
        kafka_topic: str,
        directory: Path,
        log: SqliteLog,
        forwarder: Forwarder,
        records: list[bytes],
        clock: Clock,
    ) -> None:
        make_topic(kafka_broker, kafka_topic)
        writer = KafkaWriter(
            kafka_broker.access, kafka_topic, budget_bytes=BUDGET_BYTES, deadline_s=DEADLINE_S
        )
        reader = SqliteLog.open_reader(directory)
        other = Forwarder(reader, writer, budget_bytes=BUDGET_BYTES, clock=clock)
        stop = threading.Event()
        running = [threading.Thread(target=one.run, args=(stop,)) for one in (forwarder, other)]
        for thread in running:
            thread.start()
        for record in records:
            log.append([record])
        wait_for(lambda: log.bounds() == (40, 40))
        stop.set()
        for thread in running:
            thread.join()
        writer.close()
        found = arrived(kafka_broker.access, kafka_topic)
        assert set(found) == set(ids(records))
        assert max(found.values()) <= 2
        assert forwarder.stats().failures == other.stats().failures == 0

    def test_a_kill_between_acknowledgement_and_freeing(
        self,
        kafka_broker: Kafka,
        kafka_topic: str,
        directory: Path,
        log: SqliteLog,
        forwarder: Forwarder,
        records: list[bytes],
    ) -> None:
        make_topic(kafka_broker, kafka_topic)
        log.append(records)
        child = run_child(
            """
            import os, signal, sys, time
            from pathlib import Path
            from draftkeep.ingest.forwarder import Forwarder
            from draftkeep.ingest.kafka_client import KafkaAccess
            from draftkeep.ingest.kafka_writer import KafkaWriter
            from draftkeep.ingest.log_reader import LogReader

            class Killed(LogReader):
                def free(self, up_to):
                    os.kill(os.getpid(), signal.SIGKILL)

            access = KafkaAccess(servers=(sys.argv[2],))
            writer = KafkaWriter(access, sys.argv[3], budget_bytes=2**23, deadline_s=30)
            log = Killed(Path(sys.argv[1]))
            Forwarder(log, writer, budget_bytes=2**23, clock=time.time).drain()
            """,
            directory,
            kafka_broker.bootstrap,
            kafka_topic,
        )
        child.communicate()
        assert child.returncode == -signal.SIGKILL
        assert log.bounds() == (0, 40)
        forwarder.drain()
        found = arrived(kafka_broker.access, kafka_topic)
        assert found == ids(records) + ids(records)
