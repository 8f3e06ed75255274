"""`draftkeep compact` on Kafka and PostgreSQL: alone, as a member of the group, and in trouble."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner, Result

from draftkeep.cli.commands import app
from draftkeep.errors import InputError
from draftkeep.ingest.kafka_log import KafkaLog
from draftkeep.ingest.kafka_topic import create_topic
from draftkeep.ingest.record import encode_record
from draftkeep.store import schema
from draftkeep.store.anchors import ISSUER, publish_anchor
from draftkeep.store.offsets import stored_offsets
from tests.serve.station import wait_for
from tests.services.kafka import Kafka
from tests.services.postgres import running_postgres
from tests.services.processes import Service
from tests.store.conftest import World, make_world

ROOT = Path(__file__).resolve().parents[2]
ENV = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}


class Deployment:
    """A topic of two partitions, a catalog, and a configuration that names both."""

    def __init__(self, kafka: Kafka, topic: str, world: World) -> None:
        self.kafka, self.topic, self.world = kafka, topic, world
        self.config = world.root / "config.toml"
        self.freeze: Callable[[], None] = lambda: None
        self.create()
        publish_anchor(world.root, ISSUER, world.keyring.issuer_public)

    def create(self) -> None:
        create_topic(self.kafka.access, self.topic, partitions=2, replicas=1, ttl_s=86_400)

    def configure(
        self, delete_records: str, parameters: str = "", *, deadline_s: float = 15
    ) -> None:
        self.config.write_text(f"""
            state_dir = "{self.world.root}"
            [catalog]
            url = "{self.world.catalog_url.replace("+psycopg", "")}{parameters}"
            [kafka]
            servers = {json.dumps(self.kafka.access.servers)}
            topic = "{self.topic}"
            group = "{self.topic}"
            deadline_s = {deadline_s}
            delete_records = "{delete_records}"
        """)

    def append(self, partition: int, count: int) -> None:
        log = KafkaLog(self.kafka.access, self.topic, partition=partition)
        log.append([encode_record(self.world.seal()) for _ in range(count)])
        log.close()

    def bounds(self, partition: int) -> tuple[int, int]:
        log = KafkaLog(self.kafka.access, self.topic, partition=partition)
        try:
            return log.bounds()
        finally:
            log.close()

    def stored(self) -> int:
        with self.world.catalog.read() as connection:
            count = connection.scalar(sa.select(sa.func.count()).select_from(schema.trace_ids))
        return int(count or 0)

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "draftkeep", *arguments, "--config", str(self.config)]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments), capture_output=True, text=True, env=ENV, timeout=120
        )

    def committed(self) -> dict[int, int]:
        with self.kafka.access.admin() as admin:
            (offsets,) = admin.list_group_offsets({self.topic: None}).values()
        return {item.partition: found.offset for item, found in offsets.items()}


@pytest.fixture
def deployment(
    kafka_broker: Kafka, kafka_topic: str, postgres_url: str, tmp_path: Path
) -> Iterator[Deployment]:
    world = make_world(tmp_path, postgres_url)
    yield Deployment(kafka_broker, kafka_topic, world)
    world.close()


def test_once_reads_all_partitions_and_frees_what_it_may(deployment: Deployment) -> None:
    deployment.configure("compacted")
    deployment.append(0, 3)
    deployment.append(1, 4)
    answer = deployment.run("compact")
    assert answer.returncode == 0, answer.stderr
    found = json.loads(answer.stdout)
    assert (found["stored"], found["lost"], found["lag"]) == (7, 0, 0)
    assert "ALARM" not in found
    assert [deployment.bounds(partition) for partition in (0, 1)] == [(3, 3), (4, 4)]
    log = KafkaLog(deployment.kafka.access, deployment.topic)
    deployment.append(0, 2)
    log.free(5)
    log.close()
    found = json.loads(deployment.run("compact").stdout)
    assert (found["lost"], found["gaps"]) == (2, 1)
    assert found["ALARM"] == "2 offsets were gone before they were compacted"


def test_a_member_outlives_an_outage_shows_its_lag_and_leaves(
    deployment: Deployment, tmp_path: Path
) -> None:
    deployment.configure("erasure", deadline_s=2)
    deployment.append(0, 3)
    log = tmp_path / "member.log"
    member = Service(deployment.command("compact", "--every", "0.3"), log=log, env=ENV)
    try:
        member.until(lambda: deployment.stored() == 3, "the member")
        member.until(lambda: deployment.committed() == {0: 3, 1: 0}, "the member")
        (node,) = deployment.kafka.nodes
        before = len(log.read_text())
        node.kill()
        member.until(lambda: "compacting fails" in log.read_text()[before:], "the member")
        deployment.kafka.restart(node)
        deployment.append(1, 2)
        member.until(lambda: deployment.stored() == 5, "the member")
        member.until(lambda: "compacting works again" in log.read_text(), "the member")
        member.until(lambda: deployment.committed() == {0: 3, 1: 2}, "the member")
    finally:
        member.stop()
    said = log.read_text()
    assert said[before:].partition("compacting works again")[0].count("compacting fails") == 1
    assert "Traceback" not in said
    # Nothing is freed before the deadline but for an erasure.
    assert [deployment.bounds(partition) for partition in (0, 1)] == [(0, 3), (0, 2)]
    with deployment.kafka.access.admin() as admin:
        (group,) = admin.describe_groups([deployment.topic]).values()
    assert group["members"] == []


# The command, which believes a silent statement for a moment and says when it no longer does.
HASTY = """
import sys
from functools import partial
from draftkeep.cli import main
from draftkeep.store import answers, database

ask = answers.AnsweringConnection._answers

def asking(connection):
    print("asking", file=sys.stderr, flush=True)
    return ask(connection)

answers.AnsweringConnection._answers = asking
database.make_engine = partial(database.make_engine, quiet_s=0.3)
main()
"""


@pytest.fixture
def frozen(kafka_broker: Kafka, kafka_topic: str, tmp_path: Path) -> Iterator[Deployment]:
    """One whose PostgreSQL a test may freeze."""
    with running_postgres() as server:
        world = make_world(tmp_path, server.create_database())
        deployment = Deployment(kafka_broker, kafka_topic, world)
        deployment.freeze = server.freeze
        yield deployment
        server.thaw()
        world.close()


def test_a_member_that_is_told_to_end_waits_for_no_frozen_catalog(
    frozen: Deployment, tmp_path: Path
) -> None:
    frozen.configure("erasure", "?connect_timeout=2")
    frozen.append(0, 3)
    log = tmp_path / "member.log"
    _, _, _, *arguments = frozen.command("compact", "--every", "0.3")
    member = Service([sys.executable, "-c", HASTY, *arguments], log=log, env=ENV)
    try:
        member.until(lambda: frozen.stored() == 3, "the member")
        frozen.freeze()
        member.until(lambda: "asking" in log.read_text(), "the member")
        member.ask_to_end()
        wait_for(lambda: not member.running)
    finally:
        member.kill()
    assert "Traceback" not in log.read_text()
    with frozen.kafka.access.admin() as admin:
        (group,) = admin.describe_groups([frozen.topic]).values()
    assert group["members"] == []


def test_a_topic_made_again_is_refused_with_the_remedy(
    deployment: Deployment, tmp_path: Path
) -> None:
    deployment.configure("never")
    deployment.append(0, 3)
    log = KafkaLog(deployment.kafka.access, deployment.topic)
    deployment.world.compactor(log=log, free=False).run_once()
    log.close()
    with deployment.kafka.access.admin() as admin:
        admin.delete_topics([deployment.topic])
    deployment.create()
    deployment.append(1, 1)
    answer = deployment.run("compact", "--every", "0.3")
    assert answer.returncode == 2
    (stored,) = stored_offsets(deployment.world.catalog, deployment.topic)
    remedy = ["catalog", "forget-log", stored.topic_id]
    assert f"draftkeep {' '.join(remedy)}" in answer.stderr

    def forget(*arguments: str) -> Result:
        return CliRunner().invoke(app, [*arguments, "--config", str(deployment.config)])

    assert isinstance(forget("catalog", "forget-log", "another").exception, InputError)
    shown = forget(*remedy)
    assert shown.exit_code == 1
    assert stored.topic_id in shown.output
    assert "--yes" in shown.output
    assert stored_offsets(deployment.world.catalog, deployment.topic) == [stored]
    assert forget(*remedy, "--yes").exit_code == 0
    assert stored_offsets(deployment.world.catalog, deployment.topic) == []
    assert deployment.stored() == 3
