"""Removing a topic for good: the brokers' part first, then what the catalog keeps about it.

Killed in between, the same call again finds offsets of a topic that is not there and forgets them.
"""

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from kafka.errors import KafkaError

from draftkeep.errors import InputError, StoreError
from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.ingest.kafka_state import TopicState, cluster_id, current_id, look_at_topic
from draftkeep.store.catalog import Catalog
from draftkeep.store.offsets import forget_log, stored_offsets
from draftkeep.store.schema import gaps

_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What was removed. `topic` is None where only an earlier removal was finished.

    `discarded` counts offsets that were in no shard, `offsets` the rows that were forgotten.
    """

    topic: str | None
    discarded: int
    offsets: int


def unread(state: TopicState, committed: Mapping[int, int]) -> dict[int, tuple[int, int]]:
    """By partition, the offsets [first, next) that no compactor has read; none where all are."""
    found = {}
    for number, partition in state.partitions.items():
        first = max(committed.get(number, 0), partition.first)
        if first < partition.following:
            found[number] = (first, partition.following)
    return found


def committed_offsets(catalog: Catalog, state: TopicState) -> dict[int, int]:
    """How far each partition of exactly this topic was read."""
    return {
        row.partition: row.next
        for row in stored_offsets(catalog, state.topic)
        if row.cluster == state.cluster
    }


def remove_topic(
    catalog: Catalog,
    access: KafkaAccess,
    name: str,
    *,
    discard_unread: bool,
    now_s: float,
    patience_s: float,
) -> Removal:
    """Delete the topic, wait until it is gone, forget its offsets; unread records become gaps.

    Stop whoever writes to it first. Where offsets of an earlier topic of this name are left, only
    those are forgotten. Raises StoreError, and changes nothing, where records were not read yet
    and `discard_unread` is False; InputError where there is neither topic nor offset; StoreError
    where the brokers refuse, or the topic is there still after `patience_s`: call it again.
    """
    with access.admin() as admin:
        state = look_at_topic(admin, name)
        cluster = cluster_id(admin)
        stored = stored_offsets(catalog, name)
        left = {row.topic for row in stored if row.cluster == cluster}
        left -= {state.topic} if state is not None else set()
        if left:
            forgotten = sum(forget_log(catalog, topic) for topic in left)
            return Removal(topic=None, discarded=0, offsets=forgotten)
        if state is None:
            raise InputError(f"there is no topic {name}, and the catalog knows of none")
        lost = unread(state, committed_offsets(catalog, state))
        if lost and not discard_unread:
            count = sum(after - first for first, after in lost.values())
            raise StoreError(
                f"up to {count} records in partitions {sorted(lost)} of {name} are in no shard "
                "yet; stop the nodes, run draftkeep compact, and delete it then, or give "
                "--discard-unread to lose them"
            )
        _delete(admin, state, patience_s)
    with catalog.begin() as connection:
        for number, (first, after) in lost.items():
            gap = {"cluster": state.cluster, "topic": state.topic, "partition": number}
            connection.execute(sa.insert(gaps).values(**gap, first=first, next=after, seen_s=now_s))
    forgotten = forget_log(catalog, state.topic)
    discarded = sum(after - first for first, after in lost.values())
    return Removal(topic=state.topic, discarded=discarded, offsets=forgotten)


def _delete(admin: Any, state: TopicState, patience_s: float) -> None:
    deadline_s = time.monotonic() + patience_s
    try:
        # By its id: one that was made again meanwhile stays.
        admin.delete_topics([uuid.UUID(state.topic)])
        while current_id(admin, state.name) == state.topic:
            if time.monotonic() > deadline_s:
                raise StoreError(
                    f"topic {state.name} is still there after {patience_s:g} s; check that the "
                    "brokers run, and delete it again"
                )
            time.sleep(_PAUSE_S)
    except KafkaError as error:
        raise StoreError(
            f"topic {state.name} cannot be deleted ({type(error).__name__}: {error}); check that "
            "this user may DELETE it, and delete.topic.enable on the brokers"
        ) from error
