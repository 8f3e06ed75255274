"""The services behave as the tests that use them assume."""

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import sqlalchemy as sa
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.errors import KafkaTimeoutError

from tests.services.broker_properties import SHORT_LIVED
from tests.services.kafka import Kafka
from tests.services.postgres import Postgres
from tests.services.processes import Service
from tests.services.s3 import Bucket

ROOT = Path(__file__).resolve().parents[2]


def create(kafka: Kafka, topic: str, **configs: str) -> None:
    with kafka.access.admin() as admin:
        admin.create_topics(
            {topic: {"num_partitions": 1, "configs": configs}}, wait_for_metadata=True
        )


def produce(kafka: Kafka, topic: str, values: list[bytes]) -> None:
    """Returns when all are acknowledged."""
    producer = kafka.access.connect(KafkaProducer, enable_idempotence=False, acks="all")
    try:
        for sent in [producer.send(topic, value) for value in values]:
            sent.get(timeout=30)
    finally:
        producer.close(timeout=5)


def consume(kafka: Kafka, topic: str) -> list[bytes]:
    """Everything that the topic holds."""
    consumer = kafka.access.connect(KafkaConsumer, enable_auto_commit=False)
    partition = TopicPartition(topic, 0)
    try:
        consumer.assign([partition])
        consumer.seek_to_beginning(partition)
        end = consumer.end_offsets([partition])[partition]
        values: list[bytes] = []
        while consumer.position(partition) < end:
            for records in consumer.poll(timeout_ms=500).values():
                values += [record.value for record in records]
        return values
    finally:
        consumer.close()


class TestKafka:
    def test_acknowledged_records_survive_a_kill(
        self, kafka_broker: Kafka, kafka_topic: str
    ) -> None:
        create(kafka_broker, kafka_topic)
        values = [str(number).encode() for number in range(200)]
        produce(kafka_broker, kafka_topic, values)
        (node,) = kafka_broker.nodes
        node.kill()
        assert not node.running
        kafka_broker.restart(node)
        assert consume(kafka_broker, kafka_topic) == values

    def test_a_frozen_broker_answers_nobody_until_it_thaws(
        self, kafka_broker: Kafka, kafka_topic: str
    ) -> None:
        create(kafka_broker, kafka_topic)
        (node,) = kafka_broker.nodes
        producer = kafka_broker.access.connect(KafkaProducer, enable_idempotence=False)
        producer.send(kafka_topic, b"before").get(timeout=30)
        node.freeze()
        try:
            sent = producer.send(kafka_topic, b"during")
            with pytest.raises(KafkaTimeoutError):
                sent.get(timeout=1)
        finally:
            node.thaw()
        sent.get(timeout=30)
        producer.close(timeout=5)
        assert consume(kafka_broker, kafka_topic) == [b"before", b"during"]

    def test_short_lived_records_expire(self, kafka_broker: Kafka, kafka_topic: str) -> None:
        create(kafka_broker, kafka_topic, **SHORT_LIVED)
        produce(kafka_broker, kafka_topic, [b"a", b"b"])
        kafka_broker.nodes[0].until(lambda: consume(kafka_broker, kafka_topic) == [], 30)

    def test_two_of_three_acknowledge_what_all_keep(
        self, kafka_cluster: Callable[..., Kafka], kafka_topic: str
    ) -> None:
        kafka = kafka_cluster(nodes=3)
        create(kafka, kafka_topic)
        kafka.nodes[0].kill()
        produce(kafka, kafka_topic, [b"by two"])
        kafka.restart(kafka.nodes[0])
        kafka.nodes[1].kill()
        assert consume(kafka, kafka_topic) == [b"by two"]


class TestPostgres:
    def test_every_test_has_a_database_of_its_own(self, postgres: Postgres) -> None:
        first, second = postgres.create_database(), postgres.create_database()
        for url in (first, second):
            engine = sa.create_engine(url)
            with engine.begin() as connection:
                connection.execute(sa.text("CREATE TABLE only_here (a int)"))
            engine.dispose()
        for url in (first, second):
            postgres.drop_database(url)

    def test_commits_survive_a_crash(self, postgres: Postgres, postgres_url: str) -> None:
        engine = sa.create_engine(postgres_url, poolclass=sa.NullPool)
        with engine.begin() as connection:
            connection.execute(sa.text("CREATE TABLE kept AS SELECT 1 AS a"))
        postgres.crash()
        with pytest.raises(sa.exc.OperationalError):
            engine.connect()
        postgres.start()
        with engine.begin() as connection:
            assert connection.execute(sa.text("SELECT a FROM kept")).scalar_one() == 1


def test_s3_gives_back_what_it_took(s3_bucket: Bucket) -> None:
    files = s3_bucket.filesystem()
    data = bytes(range(256)) * 40_000
    with files.open_output_stream("a/b") as stream:
        stream.write(data)
    assert files.open_input_file("a/b").read() == data
    assert files.get_file_info("a/b").size == len(data)
    files.delete_file("a/b")
    with pytest.raises(FileNotFoundError):
        files.open_input_file("a/b")


class TestService:
    def test_it_outlives_the_thread_that_started_it(self, tmp_path: Path) -> None:
        with ThreadPoolExecutor(1) as pool:
            service = pool.submit(Service, ["sleep", "60"], log=tmp_path / "log").result()
        time.sleep(0.2)
        assert service.running
        service.kill()

    @pytest.mark.skipif(sys.platform != "linux", reason="the kernel has no parent-death signal")
    @pytest.mark.parametrize("frozen", [False, True])
    def test_it_ends_with_a_killed_process(self, tmp_path: Path, frozen: bool) -> None:
        program = textwrap.dedent(f"""
            import sys
            from pathlib import Path
            from tests.services.processes import Service
            service = Service(["sleep", "600"], log=Path({str(tmp_path / "log")!r}))
            if {frozen}:
                service.freeze()
            print(service.pid, flush=True)
            sys.stdin.read()
        """)
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env={"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        process.send_signal(signal.SIGKILL)
        process.communicate()
        deadline_s = time.monotonic() + 30
        while _lives(pid) and time.monotonic() < deadline_s:
            time.sleep(0.02)
        assert not _lives(pid)

    def test_one_that_ends_early_says_why(self, tmp_path: Path) -> None:
        service = Service(["sh", "-c", "echo no such thing; exit 3"], log=tmp_path / "log")
        with pytest.raises(RuntimeError, match="no such thing"):
            service.until(lambda: False, "it")


def _lives(pid: int) -> bool:
    """A zombie that nobody reaped yet counts as gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
