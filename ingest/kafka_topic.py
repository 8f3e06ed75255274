"""Making a topic for sealed traces, with the settings that a deadline needs, and deleting it."""

import time
import uuid
from collections.abc import Mapping
from typing import Any

from kafka.errors import KafkaError, TopicAlreadyExistsError

from draftkeep.errors import StoreError
from draftkeep.ingest.kafka_client import KafkaAccess, words_of
from draftkeep.ingest.kafka_topic_state import find_topic_id, running_brokers

MAX_MESSAGE_BYTES = 2 * 1024**2
_MAX_REPLICAS = 3
_SEGMENTS_PER_TTL = 24
_SEGMENT_BYTES = 256 * 1024**2
_DELETE_DELAY_MS = 60_000
_PAUSE_S = 0.1


def default_replicas(admin: Any) -> int:
    """As many copies as brokers run, at most 3. Raises StoreError where they do not answer."""
    return min(_MAX_REPLICAS, len(running_brokers(admin)))


def topic_settings(*, ttl_s: float, replicas: int) -> dict[str, str]:
    """The settings to make a topic with whose records are to be gone after `ttl_s`.

    Two of the deadline's 24 parts are left for the segment that is being written and for the
    brokers' checks. Bodies are sealed and do not compress, so nobody tries.
    """
    segment_ms = max(1, int(ttl_s * 1000) // _SEGMENTS_PER_TTL)
    return {
        "cleanup.policy": "delete",
        "retention.ms": str(max(1, int(ttl_s * 1000) - 2 * segment_ms)),
        "segment.ms": str(segment_ms),
        "segment.jitter.ms": "0",
        "segment.bytes": str(_SEGMENT_BYTES),
        "file.delete.delay.ms": str(min(_DELETE_DELAY_MS, segment_ms // 4)),
        "message.timestamp.type": "LogAppendTime",
        "max.message.bytes": str(MAX_MESSAGE_BYTES),
        "compression.type": "uncompressed",
        "min.insync.replicas": str(2 if replicas >= 3 else 1),
        "unclean.leader.election.enable": "false",
    }


def create_topic(
    access: KafkaAccess,
    topic_name: str,
    *,
    partitions: int,
    replicas: int,
    ttl_s: float,
    overrides: Mapping[str, str] | None = None,
) -> None:
    """Make the topic and wait until every partition has a leader.

    Raises StoreError where it exists already: look at its settings with `read_retention`.
    """
    settings = {**topic_settings(ttl_s=ttl_s, replicas=replicas), **(overrides or {})}
    options = {
        "num_partitions": partitions,
        "replication_factor": replicas,
        "configs": settings,
    }
    with access.admin() as admin:
        try:
            admin.create_topics({topic_name: options}, wait_for_metadata=True)
        except TopicAlreadyExistsError as error:
            raise StoreError(
                f"topic {topic_name} is there already; look at it with draftkeep topic show and "
                "draftkeep doctor"
            ) from error
        except KafkaError as error:
            raise StoreError(
                f"topic {topic_name} cannot be made ({type(error).__name__}); check that "
                "this user may CREATE it, and that there are as many brokers as replicas"
            ) from error


def delete_topic(admin: Any, topic_name: str, topic_id: str, *, patience_s: float) -> None:
    """Delete the topic and wait until it is gone; one that was made again meanwhile stays.

    Raises StoreError where the brokers refuse, or it is there still after `patience_s`: call it
    again.
    """
    deadline_s = time.monotonic() + patience_s
    try:
        admin.delete_topics([uuid.UUID(topic_id)])
        while find_topic_id(admin, topic_name) == topic_id:
            if time.monotonic() > deadline_s:
                raise StoreError(
                    f"topic {topic_name} is still there after {patience_s:g} s; check that the "
                    "brokers run, and delete it again"
                )
            time.sleep(_PAUSE_S)
    except KafkaError as error:
        raise StoreError(
            f"topic {topic_name} cannot be deleted ({type(error).__name__}: {words_of(error)}); "
            "check that this user may DELETE it, and delete.topic.enable on the brokers"
        ) from error
