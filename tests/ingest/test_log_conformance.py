"""What every log promises, run against each implementation.

To add one, write a harness like `SqliteHarness` and name it in `make_harness`.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from draftkeep.errors import StoreError
from draftkeep.ingest.kafka_log import KafkaLog
from draftkeep.ingest.kafka_topic import create_topic
from draftkeep.ingest.log import Log, LogRecord
from draftkeep.ingest.sqlite_log import SqliteLog
from tests.services.broker_properties import SHORT_SEGMENTS
from tests.services.kafka import Kafka

EVERYTHING = (10**6, 10**9)


class Harness(Protocol):
    """One topic that outlives the logs opened on it; `machines` of them are tried at random."""

    machines: int

    def open(self) -> Log:
        """Open the topic for appending; the log opened before was closed."""
        ...

    def open_reader(self) -> Log:
        """Open the topic as another process would, to read and to free."""
        ...

    def elapse(self, seconds: float) -> None:
        """Let the log's clock move; a negative number is a clock that was set back."""
        ...


class SqliteHarness:
    """The embedded log in a directory, with files of ten seconds."""

    machines = 40

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "topic"
        self._now_s = 1_000_000.0

    def open(self) -> Log:
        return SqliteLog(self._directory, cap_bytes=2**30, bucket_s=10, clock=lambda: self._now_s)

    def open_reader(self) -> Log:
        return SqliteLog.open_reader(self._directory)

    def elapse(self, seconds: float) -> None:
        self._now_s += seconds


class KafkaHarness:
    """A topic on a real broker, whose clock nobody sets."""

    machines = 12

    def __init__(self, kafka: Kafka, topic: str) -> None:
        self._access = kafka.access
        self._topic = topic
        self._readers: list[KafkaLog] = []
        create_topic(
            self._access, topic, partitions=1, replicas=1, ttl_s=86400, overrides=SHORT_SEGMENTS
        )

    def open(self) -> Log:
        return KafkaLog(self._access, self._topic)

    def open_reader(self) -> Log:
        if not self._readers:
            self._readers.append(KafkaLog(self._access, self._topic))
        return self._readers[0]

    def elapse(self, seconds: float) -> None:
        pass

    def close(self) -> None:
        for reader in self._readers:
            reader.close()


@pytest.fixture(params=["kafka", "sqlite"])
def make_harness(request: pytest.FixtureRequest) -> Iterator[Callable[[Path], Harness]]:
    if request.param == "sqlite":
        yield SqliteHarness
        return
    kafka: Kafka = request.getfixturevalue("kafka_broker")
    made: list[KafkaHarness] = []

    def make(directory: Path) -> Harness:
        made.append(KafkaHarness(kafka, f"{directory.name}-{secrets.token_hex(6)}"))
        return made[-1]

    yield make
    for harness in made:
        harness.close()


@pytest.fixture
def harness(make_harness: Callable[[Path], Harness], tmp_path: Path) -> Harness:
    return make_harness(tmp_path)


@pytest.fixture
def log(harness: Harness) -> Iterator[Log]:
    log = harness.open()
    yield log
    log.close()


def data_of(records: list[LogRecord]) -> list[bytes]:
    return [record.data for record in records]


class TestLog:
    def test_a_new_log_is_empty(self, log: Log) -> None:
        assert log.bounds() == (0, 0)
        assert log.read(0, *EVERYTHING) == []

    def test_offsets_count_records(self, log: Log) -> None:
        assert [log.append([b"a", b"b"]), log.append([b"c"]), log.append([b""])] == [0, 2, 3]
        records = log.read(0, *EVERYTHING)
        assert [(record.offset, record.data) for record in records] == [
            (0, b"a"),
            (1, b"b"),
            (2, b"c"),
            (3, b""),
        ]
        assert log.bounds() == (0, 4)

    def test_an_append_of_nothing_takes_no_offset(self, log: Log) -> None:
        log.append([b"a"])
        assert log.append([]) == 1
        assert log.bounds() == (0, 1)

    def test_limits_stop_before_they_are_exceeded(self, log: Log) -> None:
        log.append([b"x" * 10] * 5)
        assert len(log.read(0, 3, 10**9)) == 3
        assert len(log.read(0, 10**6, 39)) == 3
        assert len(log.read(0, 10**6, 40)) == 4

    def test_one_record_comes_however_small_the_limit(self, log: Log) -> None:
        log.append([b"x" * 1000, b"y"])
        assert data_of(log.read(0, 1, 1)) == [b"x" * 1000]

    def test_bytes_come_back_as_they_were(self, log: Log) -> None:
        record = bytes(range(256)) * 3600
        log.append([record, b"\x00", record])
        assert data_of(log.read(0, *EVERYTHING)) == [record, b"\x00", record]

    def test_freed_records_are_gone_for_every_reader(self, harness: Harness, log: Log) -> None:
        log.append([b"a", b"b", b"c"])
        reader = harness.open_reader()
        reader.free(2)
        for view in (log, reader):
            assert view.bounds() == (2, 3)
            assert data_of(view.read(0, *EVERYTHING)) == [b"c"]

    def test_freeing_again_changes_nothing(self, log: Log) -> None:
        log.append([b"a", b"b", b"c"])
        for up_to in (2, 2, 1, 0):
            log.free(up_to)
            assert log.bounds() == (2, 3)

    def test_offsets_are_not_reused_after_everything_was_freed(self, harness: Harness) -> None:
        for round_ in range(3):
            log = harness.open()
            first = log.append([b"a", b"b"])
            assert first == 2 * round_
            harness.elapse(11)
            log.free(first + 2)
            log.close()
        log = harness.open()
        assert log.bounds() == (6, 6)
        assert log.append([b"c"]) == 6
        log.close()

    def test_positions_beyond_the_end_are_refused(self, log: Log) -> None:
        log.append([b"a"])
        with pytest.raises(StoreError, match="ends at 1"):
            log.read(2, *EVERYTHING)
        with pytest.raises(StoreError, match="ends at 1"):
            log.free(2)
        assert data_of(log.read(0, *EVERYTHING)) == [b"a"]

    def test_identity_outlives_the_process(self, harness: Harness) -> None:
        log = harness.open()
        identity = log.identity()
        log.append([b"a"])
        harness.elapse(100)
        log.append([b"b"])
        log.free(2)
        log.close()
        again = harness.open()
        assert again.identity() == identity == harness.open_reader().identity()
        assert again.name == log.name == harness.open_reader().name != ""
        again.close()

    def test_two_topics_differ(
        self, make_harness: Callable[[Path], Harness], tmp_path: Path
    ) -> None:
        logs = [make_harness(tmp_path / name).open() for name in ("a", "b")]
        assert logs[0].identity() != logs[1].identity()
        for log in logs:
            log.close()

    def test_a_closed_log_refuses(self, harness: Harness) -> None:
        log = harness.open()
        log.close()
        log.close()
        with pytest.raises(StoreError, match="closed"):
            log.append([b"a"])

    def test_concurrent_appends_are_whole_and_in_their_places(self, log: Log) -> None:
        def append(worker: int) -> list[tuple[int, list[bytes]]]:
            batches = [[f"{worker}-{i}-{j}".encode() for j in range(i % 3 + 1)] for i in range(20)]
            return [(log.append(batch), batch) for batch in batches]

        with ThreadPoolExecutor(8) as pool:
            done = [item for batches in pool.map(append, range(8)) for item in batches]
        stored = data_of(log.read(0, *EVERYTHING))
        assert len(stored) == sum(len(batch) for _, batch in done)
        for first, batch in done:
            assert stored[first : first + len(batch)] == batch

    def test_a_reader_meets_no_gap_beside_a_writer(self, harness: Harness, log: Log) -> None:
        """All that was read is freed at once, so every append is the first record for a moment."""

        def append() -> None:
            for i in range(200):
                harness.elapse(1.0)
                log.append([str(i).encode()])

        reader = harness.open_reader()
        position = 0
        with ThreadPoolExecutor(1) as pool:
            appending = pool.submit(append)
            while position < 200:
                first, following = reader.bounds()
                assert first == position <= following
                for record in reader.read(position, *EVERYTHING):
                    assert record.data == str(position).encode()
                    position += 1
                reader.free(position)
                if appending.done():
                    appending.result()

    def test_size_grows_and_shrinks_with_what_is_held(self, log: Log) -> None:
        """At once in files of its own; on brokers once the segments go that hold nothing else."""
        empty = log.size_bytes()
        for _ in range(4):
            log.append([b"x" * 100_000] * 10)
        assert log.size_bytes() >= empty + 4_000_000
        log.free(40)
        deadline_s = time.monotonic() + 60
        while log.size_bytes() >= empty + 2_000_000 and time.monotonic() < deadline_s:
            time.sleep(0.2)
        assert log.size_bytes() < empty + 2_000_000


class LogMachine(RuleBasedStateMachine):
    """Appends, reads, frees, reopens and clock steps, against a list."""

    make_harness: Callable[[Path], Harness]
    fresh_directory: Callable[[], Path]

    @initialize()
    def begin(self) -> None:
        self.harness = type(self).make_harness(type(self).fresh_directory())
        self.log = self.harness.open()
        self.first = 0
        self.model: list[bytes] = []

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.log.close()

    @rule(
        sizes=st.lists(st.integers(0, 40_000), max_size=4), fill=st.binary(min_size=1, max_size=1)
    )
    def append(self, sizes: list[int], fill: bytes) -> None:
        batch = [fill * size for size in sizes]
        assert self.log.append(batch) == len(self.model)
        self.model += batch

    @rule(where=st.floats(0, 1), limit=st.integers(1, 6), limit_bytes=st.integers(1, 100_000))
    def read(self, where: float, limit: int, limit_bytes: int) -> None:
        start = round(where * len(self.model))
        records = self.log.read(start, limit, limit_bytes)
        from_ = max(start, self.first)
        assert [record.offset for record in records] == list(range(from_, from_ + len(records)))
        assert data_of(records) == self.model[from_ : from_ + len(records)]
        assert bool(records) == (from_ < len(self.model))
        assert len(records) <= limit
        taken = sum(len(record.data) for record in records)
        assert len(records) == 1 or taken <= limit_bytes
        following = self.model[from_ + len(records) :][:1]
        assert not following or len(records) == limit or taken + len(following[0]) > limit_bytes

    @rule(where=st.floats(0, 1), by_reader=st.booleans())
    def free(self, where: float, by_reader: bool) -> None:
        up_to = round(where * len(self.model))
        (self.harness.open_reader() if by_reader else self.log).free(up_to)
        self.first = max(self.first, up_to)

    @rule()
    def reopen(self) -> None:
        self.log.close()
        self.log = self.harness.open()

    @rule(seconds=st.sampled_from([3.0, 11.0, 1000.0, -15.0, -5000.0]))
    def elapse(self, seconds: float) -> None:
        self.harness.elapse(seconds)

    @invariant()
    def bounds_are_right(self) -> None:
        if hasattr(self, "log"):
            assert self.log.bounds() == (self.first, len(self.model))


def test_any_sequence_of_calls_behaves_like_a_list(
    make_harness: Callable[[Path], Harness], tmp_path_factory: pytest.TempPathFactory
) -> None:
    class Machine(LogMachine):
        pass

    machines = make_harness(tmp_path_factory.mktemp("topic")).machines
    Machine.make_harness = staticmethod(make_harness)
    Machine.fresh_directory = staticmethod(lambda: tmp_path_factory.mktemp("topic"))
    few = settings(max_examples=machines, stateful_step_count=25, deadline=None)
    run_state_machine_as_test(Machine, settings=few)
