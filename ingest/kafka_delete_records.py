"""Kafka's DeleteRecords: records below an offset go, for everybody and at once, but not for good.

A crash of the brokers brings them back until every broker has written down where its log begins.
"""

from collections.abc import Mapping
from typing import Any

from kafka import TopicPartition
from kafka.errors import KafkaError

from draftkeep.errors import StoreError
from draftkeep.ingest.kafka_topic_state import TopicState, broker_settings, find_topic_id

_CHECKPOINT = "log.flush.start.offset.checkpoint.interval.ms"


def delete_below(admin: Any, state: TopicState, marks: Mapping[int, int]) -> None:
    """Delete the records below each partition's mark, everybody's, for every reader.

    A crash of the brokers can bring them back until `checkpoint_s` has passed. Raises StoreError
    where a broker refuses; any of the partitions may be done then.

    The request names the topic and not its id, so the id is compared just before it. A topic that
    is deleted and made again within those milliseconds loses records only where the partition
    holds as many as the mark by then: brokers refuse a mark above the end.
    """
    try:
        if find_topic_id(admin, state.topic_name) != state.topic_id:
            raise StoreError(
                f"topic {state.topic_name} was deleted or made again just now; nothing was deleted "
                "in it"
            )
        admin.delete_records(
            {TopicPartition(state.topic_name, number): up_to for number, up_to in marks.items()}
        )
    except KafkaError as error:
        raise StoreError(
            f"records of topic {state.topic_name} cannot be deleted ({type(error).__name__}); "
            "check that the brokers answer, and that this user may DELETE in the topic"
        ) from error


def checkpoint_s(admin: Any) -> float:
    """The longest that any broker waits before it writes down what was deleted."""
    return max(int(broker[_CHECKPOINT]) for broker in broker_settings(admin).values()) / 1000
