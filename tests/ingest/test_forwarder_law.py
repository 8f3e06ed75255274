"""The forwarder's law, in any sequence of outcomes: what was freed had been acknowledged."""

import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftkeep.errors import StoreError
from draftkeep.ingest import forwarder as forwarder_module
from draftkeep.ingest.forwarder import Forwarder
from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.ingest.kafka_writer import KafkaWriter, Sending
from draftkeep.ingest.log import Log, LogRecord, PartitionId
from tests.ingest.steady import drained

ACCESS = KafkaAccess(servers=("127.0.0.1:1",))


class Told(Sending):
    """Acknowledges those records of a group whose turn in `outcome` is true."""

    def __init__(self, outcome: Sequence[bool], records: Sequence[bytes], into: set[bytes]) -> None:
        self._outcome, self._group, self._into = outcome, records, into

    def wait(self) -> list[int]:
        self._into.update(
            record for record, taken in zip(self._group, self._outcome, strict=True) if taken
        )
        if not all(self._outcome):
            raise StoreError("not all")
        return [0] * len(self._group)

    def unacknowledged(self) -> list[int]:
        return [index for index, taken in enumerate(self._outcome) if not taken]


class ToldWriter(KafkaWriter):
    """Does with each group as the plan's next number says: take all (0, and when the plan is
    over), refuse to connect (1), or take those whose bit is set."""

    def __init__(self, plan: list[int], into: set[bytes]) -> None:
        super().__init__(ACCESS, "none", budget_bytes=1, deadline_s=1)
        self._plan, self._into = plan, into

    def begin(
        self,
        records: Sequence[bytes],
        *,
        partition: int | None = None,
        keys: Sequence[bytes] | None = None,
    ) -> Sending:
        number = self._plan.pop(0) if self._plan else 0
        if number == 1:
            raise StoreError("no broker")
        taken = [number == 0 or bool(number >> (index + 1) & 1) for index in range(len(records))]
        return Told(taken, records, self._into)


class MemoryLog:
    """A log of numbers that can refuse to free."""

    name = "traces"

    def __init__(self) -> None:
        self.first = 0
        self.records: list[bytes] = []
        self.refuses = False

    def append(self, records: Sequence[bytes]) -> int:
        self.records += records
        return len(self.records) - len(records)

    def read(self, start: int, limit_records: int, limit_bytes: int) -> list[LogRecord]:
        start = max(start, self.first)
        end = min(len(self.records), start + limit_records)
        return [
            LogRecord(offset=offset, data=self.records[offset], appended_s=0.0)
            for offset in range(start, end)
        ]

    def free(self, up_to: int) -> None:
        if self.refuses:
            raise StoreError("busy")
        self.first = max(self.first, up_to)

    def bounds(self) -> tuple[int, int]:
        return self.first, len(self.records)

    def size_bytes(self) -> int:
        return len(self.records)

    def identity(self) -> PartitionId:
        return PartitionId(cluster="cluster", topic_id="topic", partition=0)

    def close(self) -> None:
        pass


# What happens next: so many records come, the forwarder runs with such luck, or it crashes.
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.integers(1, 9)),
        st.tuples(st.just("drain"), st.lists(st.integers(0, 255), max_size=6)),
        st.tuples(st.just("crash"), st.lists(st.integers(0, 255), max_size=6)),
        st.tuples(st.just("refuse"), st.booleans()),
    ),
    max_size=30,
)


@given(EVENTS)
def test_no_sequence_of_outcomes_loses_a_record(events: list[tuple[str, Any]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # Free after every acknowledgement.
        patch.setattr(forwarder_module, "_FREE_BYTES", 1)
        check_nothing_is_lost(events)


def numbered(number: int) -> bytes:
    """A record of which two are sent at once after a failure, and four before one."""
    return b"%400d" % number


def check_nothing_is_lost(events: list[tuple[str, Any]]) -> None:
    memory, taken = MemoryLog(), set[bytes]()
    log: Log = memory
    plan: list[int] = []

    def fresh() -> Forwarder:
        # Groups of four records, so that several are under way.
        writer = ToldWriter(plan, taken)
        return Forwarder(log, writer, budget_bytes=8 * 4 * 512, clock=time.time)

    forwarder = fresh()
    for event, detail in events:
        if event == "append":
            count = len(memory.records)
            log.append([numbered(number) for number in range(count, count + detail)])
        elif event == "refuse":
            memory.refuses = detail
        else:
            plan[:] = detail
            drained(forwarder)
            forwarder = fresh() if event == "crash" else forwarder
        assert {numbered(number) for number in range(memory.first)} <= taken
    memory.refuses = False
    plan.clear()
    # Two groups can still be under way with the luck they had.
    assert any(drained(forwarder) for _ in range(3))
    assert memory.first == len(memory.records)
    assert taken == set(memory.records)
    assert forwarder.stats().waiting == 0
