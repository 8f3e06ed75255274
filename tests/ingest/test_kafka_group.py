"""Membership of a consumer group on a real broker: who gets what, and what Kafka's tools see."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from kafka import KafkaConsumer

from draftkeep.errors import StoreError
from draftkeep.ingest.kafka_group import KafkaGroup
from draftkeep.ingest.kafka_topic import create_topic
from draftkeep.ingest.kafka_topic_state import require_partitions
from tests.services.kafka import Kafka

EVERYTHING = frozenset(range(4))
# The least that a broker allows by default.
SESSION_S = 6.0


@pytest.fixture
def topic(kafka_broker: Kafka, kafka_topic: str) -> str:
    create_topic(kafka_broker.access, kafka_topic, partitions=4, replicas=1, ttl_s=86_400)
    return kafka_topic


@pytest.fixture
def join(kafka_broker: Kafka, topic: str) -> Iterator[Callable[..., KafkaGroup]]:
    """Become one more member of a group that has the topic's name."""
    members: list[KafkaGroup] = []

    def join(**options: Any) -> KafkaGroup:
        access = replace(kafka_broker.access, patience_s=2.0)
        members.append(KafkaGroup(access, topic, topic, session_s=SESSION_S, **options))
        return members[-1]

    yield join
    for member in members:
        member.leave()


def until(holds: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)


def shared_by(*members: KafkaGroup) -> Callable[[], bool]:
    """Whether these have all partitions, each its even share."""

    def shared() -> bool:
        try:
            shares = [member.assigned() for member in members]
        except StoreError:
            # It goes on trying.
            return False
        even = all(len(share) == len(EVERYTHING) // len(members) for share in shares)
        return even and frozenset().union(*shares) == EVERYTHING

    return shared


def committed(kafka: Kafka, group: str) -> dict[int, int]:
    """What Kafka's own tools say of the group."""
    with kafka.access.admin() as admin:
        (offsets,) = admin.list_group_offsets({group: None}).values()
    return {item.partition: found.offset for item, found in offsets.items()}


def test_members_share_the_partitions_and_take_over(join: Callable[..., KafkaGroup]) -> None:
    first = join()
    until(shared_by(first))
    second = join()
    until(shared_by(first, second))
    first.leave()
    until(shared_by(second))
    assert first.assigned() == frozenset()


def test_what_is_done_is_shown_by_kafka_and_moves_nothing(
    kafka_broker: Kafka, topic: str, join: Callable[..., KafkaGroup]
) -> None:
    first = join()
    until(shared_by(first))
    first.commit(1, 0)
    first.commit(3, 7)
    until(lambda: committed(kafka_broker, topic) == {1: 0, 3: 7})
    first.commit(3, 9)
    # Told at the latest when it leaves.
    first.leave()
    assert committed(kafka_broker, topic) == {1: 0, 3: 9}
    second = join()
    until(shared_by(second))
    second.commit(0, 5)
    until(lambda: committed(kafka_broker, topic) == {0: 5, 1: 0, 3: 9})


def test_who_asks_no_more_loses_its_partitions_and_gets_them_back(
    join: Callable[..., KafkaGroup],
) -> None:
    busy = join(busy_s=3.0)
    until(shared_by(busy))
    other = join()
    until(shared_by(other))
    until(shared_by(busy, other))


def test_a_broker_that_is_gone_costs_no_membership_for_good(
    kafka_broker: Kafka, join: Callable[..., KafkaGroup], caplog: pytest.LogCaptureFixture
) -> None:
    (node,) = kafka_broker.nodes
    member = join()
    until(shared_by(member))
    node.kill()
    member.commit(0, 1)
    member.commit(1, 1)
    kafka_broker.restart(node)
    until(shared_by(member))
    newcomer = join()
    until(shared_by(member, newcomer))
    ours = [r for r in caplog.records if r.name == "draftkeep.ingest.kafka_group"]
    assert len(ours) <= 1
    assert all(record.levelno == logging.WARNING for record in ours)


def test_a_broker_that_was_never_there_is_said_and_tried_again(
    kafka_broker: Kafka, join: Callable[..., KafkaGroup]
) -> None:
    (node,) = kafka_broker.nodes
    node.kill()
    member = join()

    def answer() -> str:
        try:
            return ", ".join(map(str, sorted(member.assigned())))
        except StoreError as error:
            return str(error)

    until(lambda: "lets us in" in answer())
    kafka_broker.restart(node)
    until(lambda: answer() == "0, 1, 2, 3")


def test_who_lost_the_brokers_is_not_told_that_nothing_is_its_own(
    kafka_broker: Kafka, join: Callable[..., KafkaGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Letting go takes its time without brokers, and a round in it must not pass for a good one."""
    let_go, go_on, drop = threading.Event(), threading.Event(), KafkaGroup._drop

    def slow(self: KafkaGroup, consumer: Any) -> None:
        drop(self, consumer)
        let_go.set()
        go_on.wait(60)

    monkeypatch.setattr(KafkaGroup, "_drop", slow)
    kafka_broker.nodes[0].kill()
    member = join()
    try:
        assert let_go.wait(60)
        with pytest.raises(StoreError, match="lets us in"):
            member.assigned()
    finally:
        go_on.set()


def test_a_topic_that_is_not_there_yet_is_said_and_waited_for(
    kafka_broker: Kafka, kafka_topic: str
) -> None:
    member = KafkaGroup(kafka_broker.access, kafka_topic, kafka_topic, session_s=SESSION_S)
    said: set[str] = set()

    def told() -> bool:
        try:
            return member.assigned() == EVERYTHING
        except StoreError as error:
            said.add(str(error))
            return False

    try:
        until(lambda: told() or bool(said))
        create_topic(kafka_broker.access, kafka_topic, partitions=4, replicas=1, ttl_s=86_400)
        until(told)
    finally:
        member.leave()
    assert len(said) == 1
    assert f"there is no topic {kafka_topic}; make it" in said.pop()


def test_the_partitions_of_a_topic(kafka_broker: Kafka, topic: str) -> None:
    with kafka_broker.access.admin() as admin:
        assert require_partitions(admin, topic) == (0, 1, 2, 3)
        with pytest.raises(StoreError, match=r"there is no topic nowhere; .* topic create"):
            require_partitions(admin, "nowhere")


def test_a_fault_of_the_library_is_told_and_the_member_joins_again(
    join: Callable[..., KafkaGroup], monkeypatch: pytest.MonkeyPatch
) -> None:
    member = join()
    until(shared_by(member))
    poll, broken = KafkaConsumer.poll, [True]

    def breaking(consumer: Any, *arguments: Any, **named: Any) -> Any:
        if broken[0]:
            raise AssertionError("not ready")
        return poll(consumer, *arguments, **named)

    monkeypatch.setattr(KafkaConsumer, "poll", breaking)
    until(lambda: failing(member))
    broken[0] = False
    until(lambda: not failing(member) and shared_by(member)())


def failing(member: KafkaGroup) -> bool:
    try:
        member.assigned()
    except StoreError as error:
        return "AssertionError" in str(error)
    return False
