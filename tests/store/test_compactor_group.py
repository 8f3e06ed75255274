"""Several compactors on one Kafka topic and one PostgreSQL catalog: every trace exactly once."""

import json
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from draftkeep.errors import LogReplacedError
from draftkeep.ingest.kafka_log import KafkaLog
from draftkeep.ingest.kafka_topic import create_topic
from draftkeep.ingest.kafka_writer import KafkaWriter
from draftkeep.ingest.record import SealedTrace, encode_record
from draftkeep.store import schema
from draftkeep.store.compactor import Compactor
from draftkeep.store.compactor_group import CompactorGroup, Round, totals
from draftkeep.store.offsets import forget_log
from tests.services.kafka import Kafka
from tests.services.processes import Service
from tests.store.conftest import World, ids, make_world, resign
from tests.store.group_member import Member

ROOT = Path(__file__).resolve().parents[2]
DAY_S = 86_400
PARTITIONS = 6


class Topic:
    """A topic on a real broker, and a world whose traces go to it."""

    def __init__(self, kafka: Kafka, name: str, world: World) -> None:
        self.kafka = kafka
        self.name = name
        self.world = world
        self.sent: list[SealedTrace] = []
        self.create()
        self._writer = KafkaWriter(kafka.access, name, budget_bytes=1 << 30, deadline_s=30)

    def create(self) -> None:
        create_topic(self.kafka.access, self.name, partitions=PARTITIONS, replicas=1, ttl_s=DAY_S)

    def remake(self) -> None:
        with self.kafka.access.admin() as admin:
            admin.delete_topics([self.name])
        self.create()

    def append(self, partition: int, *sealed: SealedTrace | bytes) -> None:
        """Traces, or records as they are."""
        records = [item if isinstance(item, bytes) else encode_record(item) for item in sealed]
        self._writer.append(records, partition=partition)

    def send(self, count: int) -> None:
        """Acknowledged traces, as a forwarder sends them: by trace id, some of them twice."""
        fresh = [self.world.seal() for _ in range(count)]
        twice = fresh + fresh[::10]
        keys = [item.parsed.trace_id for item in twice]
        self._writer.append([encode_record(item) for item in twice], keys=keys)
        self.sent += fresh

    def log(self, partition: int = 0) -> KafkaLog:
        return KafkaLog(self.kafka.access, self.name, partition=partition)

    def compactor(self, partition: int = 0, **changes: object) -> Compactor:
        return self.world.compactor(log=self.log(partition), free=False, **changes)

    def stored(self) -> int:
        with self.world.catalog.read() as connection:
            count = connection.scalar(sa.select(sa.func.count()).select_from(schema.trace_ids))
        return int(count or 0)

    def close(self) -> None:
        self._writer.close()


@pytest.fixture
def topic(
    kafka_broker: Kafka, kafka_topic: str, postgres_catalog_url: str, tmp_path: Path
) -> Iterator[Topic]:
    world = make_world(tmp_path, postgres_catalog_url)
    topic = Topic(kafka_broker, kafka_topic, world)
    yield topic
    topic.close()
    world.close()


@pytest.fixture
def member(topic: Topic, tmp_path: Path) -> Iterator[Callable[[str], Service]]:
    """Start a member by name; whoever still runs in the end is killed."""
    started: list[Service] = []

    def start(name: str) -> Service:
        command = Member(
            servers=list(topic.kafka.access.servers),
            topic=topic.name,
            group=topic.name,
            catalog_url=topic.world.catalog_url,
            shards_dir=str(topic.world.shards_dir),
            issuer_public=topic.world.keyring.issuer_public.hex(),
            now_s=topic.world.clock(),
            freeze_file=str(tmp_path / f"freeze-{name}"),
        ).command()
        env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
        started.append(Service(command, log=tmp_path / f"member-{name}.log", env=env))
        return started[-1]

    yield start
    for service in started:
        service.kill()


def is_frozen(service: Service) -> bool:
    stat = Path(f"/proc/{service.pid}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "T"


def rounds(path: Path) -> list[dict[str, int]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.startswith("{")]


def test_members_are_killed_frozen_and_joined_and_every_trace_is_stored_once(
    topic: Topic, member: Callable[[str], Service], tmp_path: Path
) -> None:
    first, second, third = (member(name) for name in ("first", "second", "third"))
    logs = {name: tmp_path / f"member-{name}.log" for name in ("first", "second", "third")}

    def all_stored() -> bool:
        return topic.stored() == len(topic.sent)

    def all_have_work() -> bool:
        topic.send(30)
        third.until(all_stored, "the group")
        return all(rounds(path) for path in logs.values())

    third.until(all_have_work, "the members")
    (tmp_path / "freeze-second").touch()

    def second_is_frozen() -> bool:
        topic.send(30)
        return is_frozen(second)

    third.until(second_is_frozen, "the second member")
    first.kill()
    topic.send(60)
    # The frozen one's session ends, and its partitions go to the only one left.
    third.until(all_stored, "the third member")
    fourth = member("fourth")
    second.thaw()
    third.until(lambda: any(line["conflicts"] for line in rounds(logs["second"])), "the zombie")
    topic.send(60)
    third.until(all_stored, "the group")
    for service in (second, third, fourth):
        service.stop()
        assert "Traceback" not in service.log_end()
    assert ids(topic.world.stored()) == ids(topic.sent)
    assert len(topic.sent) == topic.stored()


def run(topic: Topic, compactor: Callable[[int], Compactor] | None = None) -> Round:
    """One round over all partitions, as `draftkeep compact` does."""
    group = CompactorGroup(compactor or topic.compactor)
    try:
        done = group.run_round(lambda: range(PARTITIONS))
        assert done.failures() == []
        return done
    finally:
        group.close()


def test_what_was_deleted_before_it_was_compacted_is_counted_and_passed(
    topic: Topic, caplog: pytest.LogCaptureFixture
) -> None:
    traces = [topic.world.seal() for _ in range(5)]
    topic.append(2, *traces[:2])
    assert totals(run(topic))["lost"] == 0
    topic.append(2, *traces[2:4])
    with closing(topic.log(2)) as log:
        log.free(4)
    topic.append(2, traces[4])
    found = totals(run(topic))
    assert (found["gaps"], found["lost"], found["stored"], found["lag"]) == (1, 2, 1, 0)
    assert f"LOST: partition 2 of {topic.name} no longer has the offsets 2 to 3" in caplog.text
    ours = [record for record in caplog.records if record.name.startswith("draftkeep.")]
    assert {record.levelno for record in ours} == {logging.ERROR}
    row = schema.gaps.c
    with topic.world.catalog.read() as connection:
        gaps = connection.execute(sa.select(row.partition, row.first, row.next)).all()
    assert gaps == [(2, 2, 4)]
    assert totals(run(topic))["lost"] == 0
    assert ids(topic.world.stored()) == ids([*traces[:2], traces[4]])


def test_a_topic_made_again_stops_everybody_until_it_is_forgotten(topic: Topic) -> None:
    old, new = topic.world.seal(), topic.world.seal()
    topic.append(3, old)
    run(topic)
    topic.remake()
    # At a partition that was never read, too.
    topic.append(0, new)
    with pytest.raises(LogReplacedError, match="draftkeep catalog forget-log") as caught:
        run(topic)
    assert ids(topic.world.stored()) == ids([old])
    assert forget_log(topic.world.catalog, str(caught.value).rpartition(" ")[2]) == PARTITIONS
    topic.append(3, old, new)
    found = totals(run(topic))
    assert (found["stored"], found["duplicates"], found["gaps"]) == (1, 2, 0)
    assert ids(topic.world.stored()) == ids([old, new])


def test_what_a_producer_sent_again_is_stored_once(topic: Topic) -> None:
    trace, other = topic.world.seal(), topic.world.seal()
    topic.append(0, trace, trace)
    topic.append(1, trace)
    found = totals(run(topic))
    assert (found["stored"], found["duplicates"]) == (1, 2)
    topic.append(0, trace, other)
    topic.append(5, other)
    found = totals(run(topic))
    assert (found["stored"], found["duplicates"]) == (1, 2)
    assert ids(topic.world.stored()) == ids([trace, other])


def test_of_racing_compactors_with_the_same_traces_one_stores_them(topic: Topic) -> None:
    both = [topic.world.seal() for _ in range(20)]
    alone = [topic.world.seal() for _ in range(2)]
    start = threading.Barrier(2)
    for partition in (0, 1):
        topic.append(partition, *both[:: 1 if partition else -1], alone[partition])
    done: dict[int, Round] = {}

    def race(partition: int) -> None:
        serials = [f"{partition}-{attempt}" for attempt in range(9)]

        def serial() -> str:
            if len(serials) == 9:
                # Both have looked and found nothing stored; both have yet to commit.
                start.wait(30)
            return serials.pop()

        group = CompactorGroup(lambda item: topic.compactor(item, new_serial=serial))
        done[partition] = group.run_round(lambda: (partition,))
        group.close()

    racers = [threading.Thread(target=race, args=(partition,)) for partition in (0, 1)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    found = [totals(done[partition]) for partition in (0, 1)]
    assert sorted(item["stored"] for item in found) == [1, 21]
    assert sum(item["duplicates"] for item in found) == 20
    assert ids(topic.world.stored()) == ids([*both, *alone])
    assert len(topic.world.files()) == 2


def test_lies_and_poison_are_kept_apart_and_said(
    topic: Topic, caplog: pytest.LogCaptureFixture
) -> None:
    honest, last = topic.world.seal(), topic.world.seal()
    forged = replace(topic.world.seal(), signature=b"s" * 64)
    topic.append(4, honest, b"poison", b"")
    topic.append(4, resign(topic.world, replace(honest, nonce=b"n" * 12)), forged, last)
    done = run(topic)
    (report,) = [item for item in done.reports if item.read]
    assert report.stored == 2
    assert report.dead == {"unreadable": 2, "conflict": 1, "bad_signature": 1}
    assert ids(topic.world.stored()) == ids([honest, last])
    said = [r.getMessage() for r in caplog.records if r.name.startswith("draftkeep.")]
    assert len(said) == 2
    for reason in ("bad_signature", "conflict"):
        assert f"partition 4 of {topic.name} has 1 records that no honest node" in caplog.text
        assert reason in caplog.text
