"""`draftkeep forward`: a log whose node is gone."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftkeep.ingest.kafka_topic import create_topic
from draftkeep.ingest.sqlite_log import SqliteLog
from tests.ingest.steady import arrived, wait_for
from tests.services.kafka import Kafka

DAY_S = 86_400


@pytest.fixture
def left_log(tmp_path: Path) -> Path:
    """A log that a node left behind."""
    directory = tmp_path / "state" / "log" / "traces"
    log = SqliteLog(directory, cap_bytes=2**30, bucket_s=600, clock=time.time)
    log.append([b"%d" % number for number in range(10)])
    log.close()
    return directory


def configure(directory: Path, servers: str, topic: str, *, deadline_s: float = 15) -> Path:
    path = directory / "config.toml"
    path.write_text(
        f'state_dir = "{directory / "state"}"\n'
        f'[kafka]\nservers = ["{servers}"]\ntopic = "{topic}"\ndeadline_s = {deadline_s}\n'
    )
    return path


def command(config: Path, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "draftkeep", "forward", "--config", str(config), *arguments]


def test_once_empties_the_log_or_says_why_not(
    kafka_broker: Kafka, kafka_topic: str, tmp_path: Path, left_log: Path
) -> None:
    away = configure(tmp_path, "127.0.0.1:1", kafka_topic, deadline_s=2)
    refused = subprocess.run(command(away, "--once"), capture_output=True, text=True)
    assert refused.returncode == 2
    assert "127.0.0.1:1" in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert SqliteLog.open_reader(left_log).bounds() == (0, 10)
    create_topic(kafka_broker.access, kafka_topic, partitions=2, replicas=1, ttl_s=DAY_S)
    there = configure(tmp_path, kafka_broker.bootstrap, kafka_topic)
    done = subprocess.run(command(there, "--once"), capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert (report["sent_records"], report["waiting"], report["failures"]) == (10, 0, 0)
    assert SqliteLog.open_reader(left_log).bounds() == (10, 10)
    assert arrived(kafka_broker.access, kafka_topic).total() == 10


def test_it_goes_on_until_it_is_told_to_end(
    kafka_broker: Kafka, kafka_topic: str, tmp_path: Path, left_log: Path
) -> None:
    create_topic(kafka_broker.access, kafka_topic, partitions=2, replicas=1, ttl_s=DAY_S)
    there = configure(tmp_path, kafka_broker.bootstrap, kafka_topic)
    with subprocess.Popen(command(there), stderr=subprocess.PIPE, text=True) as process:
        reader = SqliteLog.open_reader(left_log)
        try:
            wait_for(lambda: reader.bounds() == (10, 10))
        finally:
            process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 0
    assert said == ""


def test_it_wants_brokers(tmp_path: Path, left_log: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text(f'state_dir = "{tmp_path / "state"}"\n')
    refused = subprocess.run(command(config, "--once"), capture_output=True, text=True)
    assert refused.returncode == 2
    assert "kafka.servers is empty" in refused.stderr


def test_one_that_ends_says_how_much_it_leaves_and_for_whom(tmp_path: Path, left_log: Path) -> None:
    away = configure(tmp_path, "127.0.0.1:1", "nowhere")
    running = subprocess.Popen(command(away), stderr=subprocess.PIPE, text=True)
    assert running.stderr is not None
    first = running.stderr.readline()
    running.send_signal(signal.SIGTERM)
    _, rest = running.communicate(timeout=60)
    assert running.returncode == 0
    assert "forwarding to Kafka fails" in first
    assert "<KafkaConnection" not in first
    assert "10 traces stay in the log for the next start, or for draftkeep forward --once" in rest
