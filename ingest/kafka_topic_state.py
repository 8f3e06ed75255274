"""What the brokers say: which topic has a name, where its partitions begin and end, all settings.

The one place where a topic is looked up.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kafka import TopicPartition
from kafka.admin import ConfigResource, OffsetSpec
from kafka.errors import KafkaError, UnknownTopicOrPartitionError

from draftkeep.errors import StoreError
from draftkeep.ingest.kafka_client import words_of
from draftkeep.ingest.log import PartitionId


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
    """A topic as the brokers describe it; `cluster` is the id of theirs."""

    topic_name: str
    topic_id: str
    cluster: str
    partitions: Mapping[int, PartitionState]

    def partition_id(self, partition: int) -> PartitionId:
        """What the catalog calls that partition of exactly this topic."""
        return PartitionId(cluster=self.cluster, topic_id=self.topic_id, partition=partition)

    def unread(self, committed: Mapping[int, int]) -> dict[int, range]:
        """By partition, the offsets at or above `committed`; none for one that has no such."""
        found = {
            number: range(max(committed.get(number, 0), partition.first), partition.following)
            for number, partition in self.partitions.items()
        }
        return {number: offsets for number, offsets in found.items() if offsets}


def look_at_topic(admin: Any, topic_name: str) -> TopicState | None:
    """What the brokers say of the topic; None where they say that there is none.

    Raises StoreError for every other answer, a partition without a leader among them.
    """
    try:
        found = _describe(admin, topic_name)
        if found is None:
            return None
        leaderless = [p["partition_index"] for p in found["partitions"] if p["leader_id"] < 0]
        if leaderless:
            raise StoreError(
                f"partitions {sorted(leaderless)} of topic {topic_name} have no leader; check that "
                "the brokers that hold them run"
            )
        partitions = [TopicPartition(topic_name, p["partition_index"]) for p in found["partitions"]]
        first = admin.list_partition_offsets(dict.fromkeys(partitions, OffsetSpec.EARLIEST))
        last = admin.list_partition_offsets(dict.fromkeys(partitions, OffsetSpec.LATEST))
    except KafkaError as error:
        raise _not_looked_at(topic_name, error) from error
    return TopicState(
        topic_name=topic_name,
        topic_id=str(found["topic_id"]),
        cluster=cluster_id(admin),
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


def find_topic_id(admin: Any, topic_name: str) -> str | None:
    """The id of the topic that has this name; None where there is none.

    Raises KafkaError, so that the caller can ask again or say what it was for.
    """
    found = _describe(admin, topic_name)
    return None if found is None else str(found["topic_id"])


def require_topic_id(admin: Any, topic_name: str) -> str:
    """As `find_topic_id`; raises StoreError where there is no such topic."""
    topic_id = find_topic_id(admin, topic_name)
    if topic_id is None:
        raise no_topic(topic_name)
    return topic_id


def require_partitions(admin: Any, topic_name: str) -> tuple[int, ...]:
    """The numbers of a topic's partitions. Raises StoreError where there is no such topic."""
    try:
        found = _describe(admin, topic_name)
    except KafkaError as error:
        raise _not_looked_at(topic_name, error) from error
    if found is None:
        raise no_topic(topic_name)
    return tuple(sorted(item["partition_index"] for item in found["partitions"]))


def cluster_id(admin: Any) -> str:
    """The cluster's id. Raises StoreError where the brokers do not answer."""
    try:
        return str(admin.describe_cluster()["cluster_id"])
    except KafkaError as error:
        raise StoreError(
            f"the cluster does not say which it is ({type(error).__name__}); check that the "
            "brokers answer"
        ) from error


def running_brokers(admin: Any) -> list[int]:
    """The ids of the brokers that run, at least one. Raises StoreError where none can be told."""
    try:
        listed = admin.describe_cluster()["brokers"]
    except KafkaError as error:
        raise StoreError(
            f"the brokers cannot be listed ({type(error).__name__}); check that they answer"
        ) from error
    # The library lists those as well that the cluster has given up.
    running = [broker["broker_id"] for broker in listed if not broker.get("is_fenced", False)]
    if not running:
        # Who answers has just started, and the cluster does not count with it yet.
        raise StoreError("none of the brokers is in service yet; wait, or look at their own logs")
    return running


def topic_settings_of(admin: Any, topic_name: str) -> dict[str, str]:
    """Every setting of the topic, defaults included.

    Raises StoreError where it is not there or may not be read.
    """
    return _settings(admin, "TOPIC", topic_name)


def broker_settings(admin: Any) -> dict[int, dict[str, str]]:
    """Every setting of each broker that runs, by its id. Raises StoreError as above.

    One that is down cannot be asked, and is left out.
    """
    return {broker: _settings(admin, "BROKER", str(broker)) for broker in running_brokers(admin)}


def _settings(admin: Any, kind: str, name: str) -> dict[str, str]:
    try:
        answer = admin.describe_configs([ConfigResource(kind, name)], config_filter="all")
    except KafkaError as error:
        raise _not_read(kind, name, f"{type(error).__name__}: {error}") from error
    entries = answer[kind.lower()][name]
    if not entries:
        # How the library (3.0.12) tells of a refusal.
        raise _not_read(kind, name, "the brokers tell none")
    return {key: str(entry["value"]) for key, entry in entries.items()}


def _not_read(kind: str, name: str, reason: str) -> StoreError:
    return StoreError(
        f"the settings of {kind.lower()} {name} cannot be read ({reason}); check that it exists, "
        "and that this user may DESCRIBE_CONFIGS"
    )


def _describe(admin: Any, topic_name: str) -> dict[str, Any] | None:
    """Raises StoreError where the brokers say neither what it is nor that it is not there."""
    (found,) = admin.describe_topics([topic_name])
    if found["error_code"] == UnknownTopicOrPartitionError.errno:
        return None
    if found["error_code"]:
        raise StoreError(
            f"the brokers do not describe topic {topic_name} (error {found['error_code']}); check "
            "that this user may DESCRIBE it"
        )
    return dict(found)


def no_topic(topic_name: str) -> StoreError:
    """What to say where there is no topic of a name."""
    return StoreError(
        f"there is no topic {topic_name}; make it with draftkeep topic create, or correct "
        "kafka.topic"
    )


def _not_looked_at(topic_name: str, error: KafkaError) -> StoreError:
    return StoreError(
        f"topic {topic_name} cannot be looked at ({type(error).__name__}: {words_of(error)}); "
        "check that the brokers answer"
    )
