"""TopicState: which topic it is and where its partitions begin and end; and deleting below that."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kafka import TopicPartition
from kafka.admin import OffsetSpec
from kafka.errors import KafkaError, UnknownTopicOrPartitionError

from draftkeep.errors import StoreError
from draftkeep.ingest.kafka_settings import broker_settings

_CHECKPOINT = "log.flush.start.offset.checkpoint.interval.ms"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionState:
    """One partition: its readable offsets are [`first`, `following`).

    `leader` and `replicas` are broker ids. `in_sync` says whether every replica is: one that is
    not may hold records that the others have deleted.
    """

    first: int
    following: int
    leader: int
    replicas: tuple[int, ...]
    in_sync: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicState:
    """A topic as the brokers describe it. `topic` is its id, `cluster` the cluster's."""

    name: str
    cluster: str
    topic: str
    partitions: Mapping[int, PartitionState]


def look_at_topic(admin: Any, name: str) -> TopicState | None:
    """What the brokers say of the topic; None where they say that there is none.

    Raises StoreError for every other answer, a partition without a leader among them.
    """
    try:
        found = _describe(admin, name)
        if found is None:
            return None
        leaderless = [p["partition_index"] for p in found["partitions"] if p["leader_id"] < 0]
        if leaderless:
            raise StoreError(
                f"partitions {sorted(leaderless)} of topic {name} have no leader; check that the "
                "brokers that hold them run"
            )
        partitions = [TopicPartition(name, p["partition_index"]) for p in found["partitions"]]
        first = admin.list_partition_offsets(dict.fromkeys(partitions, OffsetSpec.EARLIEST))
        last = admin.list_partition_offsets(dict.fromkeys(partitions, OffsetSpec.LATEST))
    except KafkaError as error:
        raise StoreError(
            f"topic {name} cannot be looked at ({type(error).__name__}: {error}); check that the "
            "brokers answer"
        ) from error
    return TopicState(
        name=name,
        cluster=cluster_id(admin),
        topic=str(found["topic_id"]),
        partitions={
            key.partition: PartitionState(
                first=first[key].offset,
                following=last[key].offset,
                leader=said["leader_id"],
                replicas=tuple(said["replica_nodes"]),
                in_sync=set(said["isr_nodes"]) == set(said["replica_nodes"]),
            )
            for key, said in zip(partitions, found["partitions"], strict=True)
        },
    )


def cluster_id(admin: Any) -> str:
    """The cluster's id. Raises StoreError where the brokers do not answer."""
    try:
        return str(admin.describe_cluster()["cluster_id"])
    except KafkaError as error:
        raise StoreError(
            f"the cluster does not say which it is ({type(error).__name__}); check that the "
            "brokers answer"
        ) from error


def delete_below(admin: Any, state: TopicState, marks: Mapping[int, int]) -> None:
    """Delete the records below each partition's mark, everybody's, for every reader.

    A crash of the brokers can bring them back until `checkpoint_s` has passed. The request names
    the topic and not its id, so the id is compared just before it. Raises StoreError where that
    fails or a broker refuses; any of the partitions may be done then.
    """
    try:
        if current_id(admin, state.name) != state.topic:
            raise StoreError(
                f"topic {state.name} was deleted or made again just now; nothing was deleted in it"
            )
        admin.delete_records(
            {TopicPartition(state.name, number): up_to for number, up_to in marks.items()}
        )
    except KafkaError as error:
        raise StoreError(
            f"records of topic {state.name} cannot be deleted ({type(error).__name__}); check "
            "that the brokers answer, and that this user may DELETE in the topic"
        ) from error


def checkpoint_s(admin: Any) -> float:
    """The longest that any broker waits before it writes down what was deleted."""
    return max(int(broker[_CHECKPOINT]) for broker in broker_settings(admin).values()) / 1000


def current_id(admin: Any, name: str) -> str | None:
    """The id of the topic that has this name; None where there is none."""
    found = _describe(admin, name)
    return None if found is None else str(found["topic_id"])


def _describe(admin: Any, name: str) -> dict[str, Any] | None:
    """Raises StoreError where the brokers say neither what it is nor that it is not there."""
    (found,) = admin.describe_topics([name])
    if found["error_code"] == UnknownTopicOrPartitionError.errno:
        return None
    if found["error_code"]:
        raise StoreError(
            f"the brokers do not describe topic {name} (error {found['error_code']}); check that "
            "this user may DESCRIBE it"
        )
    return dict(found)
