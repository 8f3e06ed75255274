"""What an erasure owes, on Apache Kafka: crashes that undo it, topics that go, leaders that die."""

import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from draftkeep.errors import StoreError
from draftkeep.ingest.kafka_topic_state import find_topic_id
from draftkeep.store import schema
from draftkeep.store.catalog import Catalog
from tests.ingest.steady import wait_for
from tests.services.broker_properties import FAST_RETENTION
from tests.services.kafka import Kafka, Node
from tests.store.conftest import HookedCatalog
from tests.store.deletions import House, add_erasure

CHECKPOINT = "log.flush.start.offset.checkpoint.interval.ms"
QUICK = {**FAST_RETENTION, CHECKPOINT: "1000"}
# Never within a test, but at a clean stop.
SLOW = {CHECKPOINT: "3600000", "log.initial.task.delay.ms": "3600000"}
# Longer than the shared broker's checkpoint and the margin together.
LONG_S = 120


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[HookedCatalog]:
    """SQLite alone: what two databases do differently is tested without a broker."""
    plain = Catalog.open(tmp_path / "catalog.db")
    yield HookedCatalog(plain.engine)
    plain.close()


@pytest.fixture
def new_house(catalog: HookedCatalog, kafka_topic: str) -> Iterator[Callable[..., House]]:
    made: list[House] = []

    def make(kafka: Kafka, replicas: int = 1) -> House:
        house = House(access=kafka.access, name=kafka_topic, catalog=catalog)
        house.make(replicas)
        made.append(house)
        return house

    yield make
    for house in made:
        house.close()


@pytest.fixture
def house(kafka_broker: Kafka, new_house: Callable[..., House]) -> House:
    return new_house(kafka_broker)


def written(node: Node, name: str) -> int:
    """Where partition 0 begins, as the broker would remember after a crash."""
    lines = (node.data / "log-start-offset-checkpoint").read_text().splitlines()
    return max((int(line.split()[2]) for line in lines if line.startswith(f"{name} 0 ")), default=0)


def test_what_is_not_in_shards_stays_and_the_rest_goes(house: House) -> None:
    house.append(0, 10)
    house.append(1, 4)
    house.commit(0, 9)
    add_erasure(house.catalog, 1)
    report = house.round()
    assert (report.erasures, report.deleted, report.owed) == (1, 0, 2)
    assert house.owed() == [(1, 0, 10), (1, 1, 4)]
    # Innocents, who came after the erasure.
    house.append(0, 5)
    house.append(1, 2)
    house.commit(0, 12)
    assert house.round().deleted == 1
    assert house.firsts() == [10, 0]
    assert [record.offset for record in house.logs[0].read(0, 99, 10**6)] == list(range(10, 15))
    assert house.round().deleted == 0
    assert house.round(after_s=LONG_S).verified == 1
    assert house.owed() == [(1, 1, 4)]
    house.commit(1, 4)
    assert house.round().deleted == 1
    assert house.firsts() == [10, 4]


def test_a_later_erasure_does_not_make_the_earlier_wait(house: House) -> None:
    house.append(0, 3)
    house.commit(0, 3)
    add_erasure(house.catalog, 1)
    house.round()
    house.round()
    house.append(0, 3)
    add_erasure(house.catalog, 2)
    report = house.round(after_s=LONG_S)
    assert (report.erasures, report.verified) == (1, 1)
    assert house.owed() == [(2, 0, 6)]
    house.commit(0, 6)
    house.round()
    assert house.firsts() == [6, 0]


def test_with_compacted_records_go_as_soon_as_they_are_in_shards(house: House) -> None:
    house.append(0, 8)
    house.append(1, 8)
    house.commit(0, 5)
    assert house.round("compacted").owed == 0
    assert house.firsts() == [5, 0]
    house.commit(0, 6)
    house.round("never")
    assert house.firsts() == [5, 0]


def test_what_came_late_is_owed_as_well(house: House, catalog: HookedCatalog) -> None:
    house.append(0, 6)
    house.commit(0, 6)
    with catalog.begin() as connection:
        connection.execute(sa.update(schema.offsets).values(erased_to=4))
    assert house.round().deleted == 1
    assert house.firsts() == [4, 0]
    house.round()
    assert house.round(after_s=LONG_S).verified == 1
    assert house.round().owed == 0


def test_a_topic_made_again_settles_what_the_old_one_owed(house: House) -> None:
    house.append(0, 5)
    add_erasure(house.catalog, 1)
    house.round()
    house.make()
    house.append(0, 7)
    house.commit(0, 7)
    assert house.round().topic_gone == 0
    report = house.round(after_s=LONG_S)
    assert (report.topic_gone, report.owed) == (1, 0)
    assert house.outcomes() == [(0, "topic gone")]
    assert house.firsts() == [0, 0]


def test_a_topic_that_is_gone_settles_and_a_new_erasure_waits_for_one(house: House) -> None:
    house.append(0, 5)
    add_erasure(house.catalog, 1)
    house.round()
    with house.access.admin() as admin:
        admin.delete_topics([house.name])
        # The broker goes on naming it for a moment.
        wait_for(lambda: find_topic_id(admin, house.name) is None)
    add_erasure(house.catalog, 2)
    house.round()
    report = house.round(after_s=LONG_S)
    assert (report.topic_gone, report.erasures, report.owed) == (1, 0, 0)


def test_two_at_once_delete_nothing_on_an_old_look(house: House, catalog: HookedCatalog) -> None:
    house.append(0, 5)
    house.commit(0, 5)
    add_erasure(house.catalog, 1)
    house.round()
    house.round()

    def meanwhile() -> None:
        house.append(0, 5)
        house.commit(0, 10)
        add_erasure(house.catalog, 2)
        assert house.round(after_s=LONG_S).verified == 1

    catalog.hook = meanwhile
    # It looked before the other's round, and writes after it.
    report = house.round(after_s=LONG_S)
    assert (report.verified, report.deleted) == (0, 0)
    assert house.outcomes() == [(0, "verified"), (0, None)]


def test_a_crash_undoes_it_and_the_next_round_repeats_it(
    kafka_cluster: Callable[..., Kafka], new_house: Callable[..., House]
) -> None:
    kafka = kafka_cluster(extra=SLOW)
    (node,) = kafka.nodes
    house = new_house(kafka)
    house.append(0, 10)
    house.append(0, 5)
    house.commit(0, 12)
    with house.catalog.begin() as connection:
        assert connection.scalar(sa.select(sa.func.count()).select_from(schema.offsets)) == 1
    add_erasure(house.catalog, 1)
    house.round()
    house.commit(0, 15)
    assert house.round().deleted == 1
    house.append(0, 3)
    assert house.round().deleted == 0
    node.kill()
    kafka.restart(node)
    assert house.firsts() == [0, 0]
    report = house.round()
    assert (report.undone, report.deleted, report.owed) == (1, 1, 1)
    assert house.firsts() == [15, 0]
    house.round()
    # The broker would forget it still, so an hour is not enough.
    assert house.round(after_s=3600).verified == 0
    assert written(node, house.name) == 0
    assert [record.offset for record in house.logs[0].read(0, 99, 10**6)] == [15, 16, 17]


def test_what_is_verified_outlives_a_crash(
    kafka_cluster: Callable[..., Kafka], new_house: Callable[..., House]
) -> None:
    kafka = kafka_cluster(extra=QUICK)
    (node,) = kafka.nodes
    house = new_house(kafka)
    house.append(0, 10)
    house.commit(0, 10)
    add_erasure(house.catalog, 1)
    house.round()
    house.round()
    node.until(lambda: written(node, house.name) == 10, 30)
    assert house.round(after_s=30).verified == 0
    assert house.round(after_s=2).verified == 1
    node.kill()
    kafka.restart(node)
    assert house.firsts() == [10, 0]
    assert house.round().owed == 0


def test_a_leader_that_dies_starts_the_wait_anew(
    kafka_cluster: Callable[..., Kafka], new_house: Callable[..., House]
) -> None:
    kafka = kafka_cluster(nodes=3, extra=QUICK)
    house = new_house(kafka, replicas=3)
    house.append(0, 10)
    house.commit(0, 10)
    add_erasure(house.catalog, 1)
    house.round()
    house.round()
    with house.access.admin() as admin:
        (said,) = admin.describe_topics([house.name])
    leader = kafka.nodes[said["partitions"][0]["leader_id"] - 1]
    leader.kill()

    def answered() -> bool:
        try:
            house.round()
        except StoreError:
            return False
        return True

    survivor = next(node for node in kafka.nodes if node.running)
    survivor.until(answered, 60)
    assert house.firsts()[0] == 10
    # A copy that nobody can see may hold them.
    assert house.round(after_s=3600).verified == 0
    kafka.restart(leader)
    survivor.until(lambda: house.round(after_s=LONG_S).verified == 1, 60)
    assert house.firsts()[0] == 10


DRIVER = """
import sys
from pathlib import Path
from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.store.catalog import Catalog
from draftkeep.store.log_deletion_round import delete_owed_records
path, server, topic, now_s = sys.argv[1:]
catalog, access, now_s = Catalog.open(Path(path)), KafkaAccess(servers=(server,)), float(now_s)
print("ready", flush=True)
while True:
    now_s += 20
    delete_owed_records(catalog, access, topic, policy="erasure", now_s=now_s)
"""


def test_killed_anywhere_two_at_once_finish_it(
    house: House, kafka_broker: Kafka, tmp_path: Path
) -> None:
    rng = random.Random(5)
    arguments = (str(tmp_path / "catalog.db"), kafka_broker.bootstrap, house.name)

    def start() -> subprocess.Popen[str]:
        house.now_s += 1
        process = subprocess.Popen(
            [sys.executable, "-c", DRIVER, *arguments, str(house.now_s)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    committed = 0
    for number in range(1, 5):
        processes = [start(), start()]
        house.append(0, 10)
        add_erasure(house.catalog, number)
        house.commit(0, committed := committed + 8)
        for process in processes:
            with process:
                time.sleep(rng.uniform(0, 0.3))
                process.kill()
        assert house.firsts()[0] <= committed
    house.commit(0, 40)
    house.now_s += 10_000
    house.round()
    house.round()
    house.round(after_s=LONG_S)
    assert house.owed() == []
    assert house.firsts() == [40, 0]
    with house.catalog.read() as connection:
        assert connection.scalar(sa.select(sa.func.count(schema.erasures.c.log_request))) == 4
