"""What an erasure owes the broker: never above what is in shards, and settled only if it lasts."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st

from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.ingest.kafka_topic_state import PartitionState, TopicState
from draftkeep.ingest.log import PartitionId
from draftkeep.store import schema
from draftkeep.store.audit import AuditSession
from draftkeep.store.catalog import Catalog
from draftkeep.store.erasure import erase_subject
from draftkeep.store.log_deletion_round import DeletionReport, delete_owed_records, marks_below
from draftkeep.store.log_deletion_rows import read_ledger, record_request, record_steps
from draftkeep.store.log_deletion_step import Deletion, Outcome, next_step
from tests.store.conftest import World
from tests.store.deletions import NOW_S, add_erasure

INTERVAL_S = 60.0
WAIT_S = INTERVAL_S + 30
PARTITION = PartitionId(cluster="cluster", topic_id="topic-id", partition=0)


def deletion(**changes: object) -> Deletion:
    values = {"request": 1, "topic_name": "traces", "partition_id": PARTITION, "up_to": 10}
    return Deletion(**{**values, **changes})  # type: ignore[arg-type]


def topic(*firsts: int, following: int = 100, in_sync: bool = True) -> TopicState:
    partitions = {
        number: PartitionState(
            first=first, following=following, leader=1, replicas=(1,), in_sync=in_sync
        )
        for number, first in enumerate(firsts)
    }
    return TopicState(
        topic_name="traces",
        topic_id=PARTITION.topic_id,
        cluster=PARTITION.cluster,
        partitions=partitions,
    )


@dataclass
class Broker:
    """A partition whose start is written down every INTERVAL_S, and forgotten in between."""

    first: int = 0
    following: int = 0
    written: int = 0
    next_write_s: float = NOW_S + INTERVAL_S

    def advance(self, now_s: float) -> None:
        while self.next_write_s <= now_s:
            self.written = self.first
            self.next_write_s += INTERVAL_S

    def crash(self, now_s: float) -> None:
        self.first = self.written
        self.next_write_s = now_s + INTERVAL_S


class Erasing:
    """Erasures, compaction, crashes and the rounds of one housekeeper, which may be killed."""

    def __init__(self) -> None:
        self.now_s = NOW_S
        self.broker = Broker()
        self.committed = 0
        self.owed: list[Deletion] = []
        self.verified: list[Deletion] = []

    def erase(self) -> None:
        self.broker.following += 3
        request = len(self.owed) + len(self.verified)
        self.owed.append(deletion(request=request, up_to=self.broker.following))

    def compact(self) -> None:
        self.committed = self.broker.following

    def compact_a_little(self) -> None:
        self.committed = min(self.committed + 2, self.broker.following)

    def wait(self, seconds: float = 20) -> None:
        self.now_s += seconds
        self.broker.advance(self.now_s)

    def crash(self) -> None:
        self.broker.crash(self.now_s)

    def round(self, *, killed: bool = False) -> None:
        """As `delete_owed_records`; killed between what it writes down and what it deletes."""
        state = topic(self.broker.first, following=self.broker.following)
        steps = [
            next_step(
                item,
                state.partitions[0],
                committed=self.committed,
                now_s=self.now_s,
                wait_s=WAIT_S,
            )
            for item in self.owed
        ]
        self.verified += [s.deletion for s in steps if s.deletion.outcome is not None]
        self.owed = [s.deletion for s in steps if s.deletion.outcome is None]
        marks = marks_below(state, steps, {PARTITION: self.committed}, (), False)
        if marks and not killed:
            assert marks[0] <= self.committed
            self.broker.first = max(self.broker.first, marks[0])

    def killed(self) -> None:
        self.round(killed=True)


ACTIONS = (
    *(Erasing.erase, Erasing.compact, Erasing.compact_a_little, Erasing.crash, Erasing.killed),
    *((Erasing.wait, Erasing.round) * 4),
)


@settings(max_examples=500)
@given(st.lists(st.sampled_from(ACTIONS), min_size=25, max_size=50))
def test_whatever_happens_what_is_verified_lasts_and_what_is_not_in_shards_stays(
    actions: list[Callable[[Erasing], None]],
) -> None:
    house = Erasing()
    for act in actions:
        act(house)
        assert all(house.broker.written >= item.up_to for item in house.verified)
    # A quiet house settles all that is in shards, and only that.
    for _ in range(4):
        house.wait(WAIT_S)
        house.round()
    assert all(item.up_to > house.committed for item in house.owed)


@given(
    up_to=st.integers(0, 50),
    first=st.integers(0, 50),
    committed=st.none() | st.integers(0, 50),
    deleted=st.none() | st.floats(NOW_S - 500, NOW_S + 500),
    in_sync=st.booleans(),
)
def test_a_step_deletes_only_what_is_owed_there_and_committed(
    up_to: int, first: int, committed: int | None, deleted: float | None, in_sync: bool
) -> None:
    item = deletion(up_to=up_to, deleted_s=deleted)
    state = topic(first, in_sync=in_sync)
    step = next_step(item, state.partitions[0], committed=committed, now_s=NOW_S, wait_s=WAIT_S)
    assert step.delete == (first < up_to and committed is not None and committed >= up_to)
    settled = deleted is not None and deleted + WAIT_S <= NOW_S and first >= up_to and in_sync
    assert (step.deletion.outcome is Outcome.VERIFIED) == settled
    assert step.undone == (first < up_to and deleted is not None)
    known = {} if committed is None else {PARTITION: committed}
    for everything in (False, True):
        marks = marks_below(state, [step], known, (), everything)
        assert all(mark <= (committed or 0) for mark in marks.values())


def test_a_request_covers_what_was_done_and_nothing_twice(catalog: Catalog) -> None:
    first, second = add_erasure(catalog, 1), add_erasure(catalog, 2)
    add_erasure(catalog, 3, state="planned")
    assert set(read_ledger(catalog, "traces").unmarked) == {first, second}
    covered, made = record_request(catalog, topic(0, 0), [first, second], {0: 7, 1: 0}, NOW_S)
    assert (covered, [item.up_to for item in made]) == (2, [7])
    # Another compactor that had seen the same two.
    assert record_request(catalog, topic(0, 0), [first, second], {0: 9}, NOW_S) == (0, [])
    ledger = read_ledger(catalog, "traces")
    assert (ledger.unmarked, list(ledger.owed)) == ((), made)
    third = add_erasure(catalog, 4)
    _, made = record_request(catalog, topic(0), [third], {0: 9}, NOW_S)
    assert [item.request for item in made] == [2]


def test_a_request_without_records_keeps_its_number(catalog: Catalog) -> None:
    assert record_request(catalog, topic(0), [add_erasure(catalog, 1)], {0: 0}, NOW_S) == (1, [])
    _, made = record_request(catalog, topic(0), [add_erasure(catalog, 2)], {0: 5}, NOW_S)
    assert [item.request for item in made] == [2]


def test_what_another_changed_is_left_to_it(catalog: Catalog) -> None:
    _, made = record_request(catalog, topic(0, 0), [add_erasure(catalog, 1)], {0: 7, 1: 8}, NOW_S)
    zero, one = made
    mine = [replace(zero, deleted_s=NOW_S), replace(one, deleted_s=NOW_S)]
    assert record_steps(catalog, made, [replace(zero, attempts=1)], NOW_S) == set()
    assert record_steps(catalog, made, mine, NOW_S) == {zero.partition_id}
    assert list(read_ledger(catalog, "traces").owed) == [replace(zero, attempts=1), mine[1]]


def test_never_asks_nobody(catalog: Catalog) -> None:
    add_erasure(catalog, 1)
    nowhere = KafkaAccess(servers=("127.0.0.1:1",), patience_s=1)
    report = delete_owed_records(catalog, nowhere, "traces", policy="never", now_s=NOW_S)
    assert report == DeletionReport()
    assert len(read_ledger(catalog, "traces").unmarked) == 1


def test_nothing_owed_asks_nobody(catalog: Catalog) -> None:
    add_erasure(catalog, 1, state="planned")
    nowhere = KafkaAccess(servers=("127.0.0.1:1",), patience_s=1)
    report = delete_owed_records(catalog, nowhere, "traces", policy="erasure", now_s=NOW_S)
    assert report == DeletionReport()


def test_what_arrives_after_its_erasure_is_noted(world: World) -> None:
    before, after = world.seal(subject="ann"), world.seal()
    world.append(after, before, after, world.seal())
    erase_subject(world.catalog, world.keyring, tenant="acme", subject="ann", now_s=world.clock())
    world.compactor().run_once()
    with world.catalog.read() as connection:
        (row,) = connection.execute(sa.select(schema.offsets))
    assert (row.erased_to, row.next) == (2, 4)


def test_the_auditor_sees_what_is_owed(catalog: Catalog, tmp_path: object) -> None:
    asked, unasked = add_erasure(catalog, 1), add_erasure(catalog, 2)
    _, made = record_request(catalog, topic(0, 0), [asked], {0: 7, 1: 8, 2: 9}, NOW_S)
    after = [
        replace(made[0], deleted_s=NOW_S, attempts=2, outcome=Outcome.VERIFIED),
        replace(made[1], deleted_s=NOW_S, attempts=1),
    ]
    record_steps(catalog, made, after, NOW_S + 100)
    with AuditSession(catalog, tmp_path, now_s=NOW_S) as session:  # type: ignore[arg-type]
        states = session.query("SELECT partition, state FROM log_deletions ORDER BY partition")
        report = session.report("log_deletions")
    assert states.rows == ((0, "verified"), (1, "deleted"), (2, "owed"))
    lines = [dict(zip(report.columns, row, strict=True)) for row in report.rows]
    assert [line["erasure"] for line in lines] == [asked.hex(), unasked.hex()]
    assert [line["state"] for line in lines] == ["owed", "not asked"]
    assert (lines[0]["owed"], lines[0]["deleted"], lines[0]["verified"]) == (1, 1, 1)
