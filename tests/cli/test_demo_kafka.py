"""The demo over a real broker: the same stages, and no trace left waiting on the way."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from draftkeep.cli.demo.broker import remove_topic, servers_of
from draftkeep.cli.demo.setup import prepare, profile_for
from draftkeep.config import load_config
from draftkeep.errors import ConfigError, InputError
from tests.services.kafka import Kafka

DEMO = [sys.executable, "-m", "draftkeep", "demo", "--model", "tiny"]


@pytest.mark.timeout(600)
def test_the_whole_demo_runs_through_the_broker(kafka_broker: Kafka, tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    command = [*DEMO, "--state-dir", str(state_dir), "--log", f"kafka://{kafka_broker.bootstrap}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    progress = json.loads((state_dir / "demo" / "progress.json").read_text())
    requests = sum(progress["round one"]["requests"].values())
    assert progress["compaction"]["stored"] == requests
    assert progress["compaction"]["duplicates"] == 0
    report = json.loads((state_dir / "report.json").read_text())
    assert report["domains"]["sql"]["replay_after"] > report["domains"]["sql"]["replay_before"]
    erased = report["erased"]["traces"]
    assert erased > 0
    assert report["erased"] == {"traces": erased, "opened_after": 0, "rows_removed": erased}

    config = load_config(state_dir / "config.toml")
    with kafka_broker.access.admin() as admin:
        assert config.kafka.topic in admin.list_topics()
        remove_topic(config)
        assert config.kafka.topic not in admin.list_topics()


@pytest.mark.parametrize(
    ("url", "servers"),
    [
        ("kafka://127.0.0.1:9092", ("127.0.0.1:9092",)),
        ("kafka://a.example:9092,b.example:9093/", ("a.example:9092", "b.example:9093")),
    ],
)
def test_a_brokers_address_is_read(url: str, servers: tuple[str, ...]) -> None:
    assert servers_of(url) == servers


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:9092", "kafka://", "kafka://host", "kafka://user:word@host:9092", "http://h:1"],
)
def test_what_is_no_brokers_address_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(InputError, match="kafka://HOST:PORT") as caught:
        servers_of(url)
    assert "word" not in str(caught.value)


def test_a_demo_of_another_log_is_refused(tmp_path: Path) -> None:
    profile = profile_for("tiny")
    prepare(tmp_path, profile, ())
    with pytest.raises(ConfigError, match="--log"):
        prepare(tmp_path, profile, ("127.0.0.1:9092",))
