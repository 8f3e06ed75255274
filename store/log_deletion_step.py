"""Deletion: what one partition of a topic still owes to erasures, and the next step towards it.

Deleting in Kafka is undone by a crash until every broker has written down where its log starts.
So the records count as gone for good only once they were seen gone without interruption for
longer than that takes; whenever they come back, they are deleted again and the wait starts again.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from draftkeep.ingest.kafka_topic_state import PartitionState
from draftkeep.ingest.log import PartitionId


class Outcome(StrEnum):
    """How a deletion ended: seen to last, or with its whole topic."""

    VERIFIED = "verified"
    TOPIC_GONE = "topic gone"


@dataclass(frozen=True, slots=True, kw_only=True)
class Deletion:
    """A row of `log_deletions` that is not settled; see there."""

    request: int
    topic_name: str
    partition_id: PartitionId
    up_to: int
    deleted_s: float | None = None
    attempts: int = 0
    outcome: Outcome | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A deletion as it stands after a look, and whether to delete its records now.

    `undone` says that they had been seen gone and are back.
    """

    deletion: Deletion
    delete: bool = False
    undone: bool = False


def next_step(
    item: Deletion,
    seen: PartitionState | None,
    *,
    committed: int | None,
    now_s: float,
    wait_s: float,
) -> Step:
    """What follows from a look at the partition; `seen` None: the topic with that id is gone.

    `now_s` is a time before the look, so that no interval is taken for longer than it was.
    Nothing is deleted before `committed`, the first offset that is not in a shard, has reached
    the whole of what is owed: the records go with everybody's. A replica that is not in sync may
    still hold them, and begins the wait anew.
    """
    if seen is not None and seen.first < item.up_to:
        delete = committed is not None and committed >= item.up_to
        after = replace(item, deleted_s=None, attempts=item.attempts + delete)
        return Step(deletion=after, delete=delete, undone=item.deleted_s is not None)
    if seen is not None and not seen.in_sync:
        return Step(deletion=replace(item, deleted_s=None))
    if item.deleted_s is None:
        return Step(deletion=replace(item, deleted_s=now_s))
    if now_s - item.deleted_s < wait_s:
        return Step(deletion=item)
    outcome = Outcome.TOPIC_GONE if seen is None else Outcome.VERIFIED
    return Step(deletion=replace(item, outcome=outcome))
