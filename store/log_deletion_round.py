"""What erasures owe the broker, carried out round by round. Needs no key.

For every erasure that is done, the records that its topic held by then must leave it. All state is
in the catalog, so any process may carry on where another was killed, and several at once do no
harm: before records are deleted it is written down that they were there, by compare-and-set.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.ingest.kafka_delete_records import checkpoint_s, delete_below
from draftkeep.ingest.kafka_topic_state import (
    PartitionState,
    TopicState,
    cluster_id,
    look_at_topic,
)
from draftkeep.ingest.log import PartitionId
from draftkeep.store.catalog import Catalog
from draftkeep.store.log_deletion_rows import Ledger, read_ledger, record_request, record_steps
from draftkeep.store.log_deletion_step import Deletion, Outcome, Step, next_step

# Over the brokers' own interval: for a checkpoint that is late, and clocks that differ.
MARGIN_S = 30.0

Policy = Literal["never", "erasure", "compacted"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeletionReport:
    """One round. All but `erasures` (newly taken up) and `owed` count partitions of requests.

    `deleted` were asked to go, `undone` had come back, `verified` lasted, `topic_gone` went with
    their topic; `owed` are not settled yet, those of other clusters included.
    """

    erasures: int = 0
    deleted: int = 0
    undone: int = 0
    verified: int = 0
    topic_gone: int = 0
    owed: int = 0


def delete_owed_records(
    catalog: Catalog, access: KafkaAccess, topic_name: str, *, policy: Policy, now_s: float
) -> DeletionReport:
    """One round; call it again and again, as long as `owed` is not 0 and after every erasure.

    `now_s` is the time when it is called. With `never` nothing happens. With `compacted` records
    go as soon as they are in shards, erasure or not. Nothing is ever deleted at or above the
    committed offset of the catalog. Asks no broker where nothing is owed. Raises StoreError where
    brokers do not answer or refuse; the next round goes on.
    """
    if policy == "never":
        return DeletionReport()
    ledger = read_ledger(catalog, topic_name)
    if not (ledger.unmarked or ledger.owed or ledger.late or policy == "compacted"):
        return DeletionReport()
    with access.admin() as admin:
        names = {topic_name, *(item.topic_name for item in ledger.owed)}
        states = {name: look_at_topic(admin, name) for name in names}
        wait_s = checkpoint_s(admin) + MARGIN_S
        cluster = cluster_id(admin)
        erasures, made = _request(catalog, ledger, states[topic_name], now_s)
        before = [*ledger.owed, *made]
        steps = [
            next_step(
                item,
                _seen(states[item.topic_name], item),
                committed=ledger.committed.get(item.partition_id),
                now_s=now_s,
                wait_s=wait_s,
            )
            for item in before
            # What another cluster holds nobody here can say.
            if item.partition_id.cluster == cluster
        ]
        lost = record_steps(catalog, before, [step.deletion for step in steps], now_s)
        kept = [step for step in steps if step.deletion.partition_id not in lost]
        for state in states.values():
            if state is not None:
                everything = policy == "compacted" and state.topic_name == topic_name
                marks = marks_below(state, kept, ledger.committed, lost, everything)
                if marks:
                    delete_below(admin, state, marks)
    return _report(len(before), kept, erasures)


def _request(
    catalog: Catalog, ledger: Ledger, state: TopicState | None, now_s: float
) -> tuple[int, list[Deletion]]:
    """Mark where the topic ends, for the erasures that were done before that was asked."""
    if state is None or not (ledger.unmarked or ledger.late):
        return 0, []
    if ledger.unmarked:
        marks = {number: partition.following for number, partition in state.partitions.items()}
    else:
        marks = {
            identity.partition: up_to
            for identity, up_to in ledger.late.items()
            if identity == state.partition_id(identity.partition)
        }
    return record_request(catalog, state, ledger.unmarked, marks, now_s)


def _seen(state: TopicState | None, item: Deletion) -> PartitionState | None:
    if state is None or state.topic_id != item.partition_id.topic_id:
        return None
    return state.partitions[item.partition_id.partition]


def marks_below(
    state: TopicState,
    steps: Iterable[Step],
    committed: Mapping[PartitionId, int],
    lost: Iterable[PartitionId],
    everything: bool,
) -> dict[int, int]:
    """Below which offset to delete in each partition. Never above the committed offset."""
    marks: dict[int, int] = {}
    for step in steps:
        identity, up_to = step.deletion.partition_id, step.deletion.up_to
        number = identity.partition
        if step.delete and identity == state.partition_id(number):
            marks[number] = max(up_to, marks.get(number, 0))
    if everything:
        for number, partition in state.partitions.items():
            identity = state.partition_id(number)
            if identity not in lost and committed.get(identity, 0) > partition.first:
                marks[number] = committed[identity]
    return marks


def _report(owed: int, steps: list[Step], erasures: int) -> DeletionReport:
    outcomes = [step.deletion.outcome for step in steps]
    return DeletionReport(
        erasures=erasures,
        deleted=sum(step.delete for step in steps),
        undone=sum(step.undone for step in steps),
        verified=outcomes.count(Outcome.VERIFIED),
        topic_gone=outcomes.count(Outcome.TOPIC_GONE),
        owed=owed - sum(outcome is not None for outcome in outcomes),
    )
