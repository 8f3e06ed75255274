"""Removing a topic for good: the brokers' part first, then what the catalog keeps about it.

Killed in between, the same call again finds offsets of a topic that is not there and forgets them.
"""

from dataclasses import dataclass

from draftkeep.errors import InputError, StoreError
from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.ingest.kafka_topic import delete_topic
from draftkeep.ingest.kafka_topic_state import cluster_id, look_at_topic
from draftkeep.store.catalog import Catalog
from draftkeep.store.offsets import add_gaps, committed_offsets, forget_log, stored_offsets


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What was removed. `topic_id` is None where only an earlier removal was finished.

    `discarded` counts offsets that were in no shard, `offsets` the rows that were forgotten.
    """

    topic_id: str | None
    discarded: int
    offsets: int


def remove_topic(
    catalog: Catalog,
    access: KafkaAccess,
    topic_name: str,
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
        state = look_at_topic(admin, topic_name)
        cluster = cluster_id(admin)
        stored = stored_offsets(catalog, topic_name)
        left = {row.topic_id for row in stored if row.cluster == cluster}
        left -= {state.topic_id} if state is not None else set()
        if left:
            forgotten = sum(forget_log(catalog, topic_id) for topic_id in left)
            return Removal(topic_id=None, discarded=0, offsets=forgotten)
        if state is None:
            raise InputError(f"there is no topic {topic_name}, and the catalog knows of none")
        unread = state.unread(committed_offsets(catalog, state))
        count = sum(len(offsets) for offsets in unread.values())
        if unread and not discard_unread:
            raise StoreError(
                f"up to {count} records in partitions {sorted(unread)} of {topic_name} are in no "
                "shard yet; stop the nodes, run draftkeep compact, and delete it then, or give "
                "--discard-unread to lose them"
            )
        delete_topic(admin, topic_name, state.topic_id, patience_s=patience_s)
    with catalog.begin() as connection:
        for number, offsets in unread.items():
            gap = (offsets.start, offsets.stop)
            add_gaps(connection, state.partition_id(number), [gap], now_s)
    forgotten = forget_log(catalog, state.topic_id)
    return Removal(topic_id=state.topic_id, discarded=count, offsets=forgotten)
