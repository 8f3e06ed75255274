"""A log that loses, repeats or changes under the compactor, and rivals on the same log."""

import pytest
import sqlalchemy as sa

from draftkeep.errors import ConflictError, LogReplacedError
from draftkeep.ingest.log import LogRecord, PartitionId
from draftkeep.ingest.record import encode_record
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.store import schema
from draftkeep.store.offsets import forget_log, stored_offsets
from draftkeep.store.sweeper import Sweeper
from tests.store.conftest import HookedCatalog, World, ids


def test_batches_follow_each_other_until_the_log_is_empty(world: World) -> None:
    sealed = [world.seal() for _ in range(7)]
    world.append(*sealed)
    compactor = world.compactor(limit_records=3)
    assert [compactor.run_once().read for _ in range(4)] == [3, 3, 1, 0]
    assert ids(world.stored()) == ids(sealed)


def test_records_the_log_lost_are_a_gap_and_not_the_end(world: World) -> None:
    world.append(*[world.seal() for _ in range(3)])
    compactor = world.compactor(limit_records=1, free=False)
    compactor.run_once()
    world.log.free(2)
    report = world.compactor().run_once()
    assert (report.stored, report.gaps) == (1, ((1, 2),))
    world.append(world.seal(), world.seal())
    world.log.free(5)
    report = world.compactor().run_once()
    assert (report.read, report.gaps, report.next_offset) == (0, ((3, 5),), 5)
    assert world.compactor().run_once().gaps == ()
    with world.catalog.read() as connection:
        found = connection.execute(sa.select(schema.gaps.c.first, schema.gaps.c.next)).all()
    assert found == [(1, 2), (3, 5)]


def test_what_a_log_lost_before_it_was_met_is_no_gap(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.append(*[world.seal() for _ in range(3)])
    world.log.free(2)
    report = world.compactor().run_once()
    assert (report.stored, report.gaps) == (1, ())
    (said,) = [record for record in caplog.records if record.name.startswith("draftkeep.")]
    assert said.levelname == "WARNING"
    assert "is met for the first time and begins at offset 2" in said.getMessage()


def test_an_empty_log_is_met_too(world: World) -> None:
    """What it loses before the next look is known to be lost."""
    assert world.compactor().run_once().next_offset == 0
    world.append(world.seal(), world.seal())
    world.log.free(1)
    assert world.compactor().run_once().gaps == ((0, 1),)


class OtherLog:
    """A log that is another than it says or holds other offsets than it should."""

    def __init__(self, log: SqliteLog) -> None:
        self._log = log
        self.name = log.name
        self.topic: str | None = None
        self.partition = 0
        self.end: int | None = None
        self.first: int | None = None
        self.skip: set[int] = set()
        self.append, self.free, self.close = log.append, log.free, log.close
        self.size_bytes = log.size_bytes

    def identity(self) -> PartitionId:
        cluster, topic_id, _ = self._log.identity()
        return PartitionId(cluster, self.topic or topic_id, self.partition)

    def bounds(self) -> tuple[int, int]:
        first, end = self._log.bounds()
        return first if self.first is None else self.first, end if self.end is None else self.end

    def read(self, start: int, limit_records: int, limit_bytes: int) -> list[LogRecord]:
        found = self._log.read(start, limit_records, limit_bytes)
        return [record for record in found if record.offset not in self.skip]


def test_a_topic_made_again_stops_the_compactor(world: World) -> None:
    """Seen at any partition, also at one that held nothing before."""
    world.append(world.seal())
    log = OtherLog(world.log)
    world.compactor(log=log).run_once()
    log.topic = "made-again"
    for partition in (0, 1):
        log.partition = partition
        old = world.log.identity().topic_id
        with pytest.raises(LogReplacedError, match=f"draftkeep catalog forget-log {old}$"):
            world.compactor(log=log).run_once()
    (stored,) = stored_offsets(world.catalog, "log")
    assert (stored.partition, stored.next) == (0, 1)
    assert forget_log(world.catalog, old) == 1
    world.append(world.seal())
    assert world.compactor(log=log).run_once().stored == 1


def test_topics_of_other_names_are_other_logs(world: World) -> None:
    world.append(world.seal())
    log = OtherLog(world.log)
    world.compactor(log=log).run_once()
    log.topic, log.name = "another", "another"
    world.append(world.seal())
    assert world.compactor(log=log).run_once().stored == 1
    assert forget_log(world.catalog, "another") == 1
    assert len(stored_offsets(world.catalog, "log")) == 1


def test_a_log_that_was_read_before_it_had_a_name_is_known_by_its_id(world: World) -> None:
    world.append(world.seal())
    log = OtherLog(world.log)
    world.compactor(log=log).run_once()
    with world.catalog.begin() as connection:
        connection.execute(sa.update(schema.offsets).values(name=""))
    topic_id = log.identity().topic_id
    log.topic = "made-again"
    with pytest.raises(LogReplacedError, match=f"expected {topic_id}") as caught:
        world.compactor(log=log).run_once()
    # What the message says finds a row without a name.
    remedy = str(caught.value).rpartition(" ")[2]
    assert [found.next for found in stored_offsets(world.catalog, remedy)] == [1]
    log.topic = None
    world.append(world.seal())
    assert world.compactor(log=log).run_once().stored == 1
    (stored,) = stored_offsets(world.catalog, "log")
    assert stored.topic_id == topic_id


def test_a_log_that_ends_below_the_stored_offset_stops_the_compactor(world: World) -> None:
    world.append(world.seal(), world.seal())
    log = OtherLog(world.log)
    world.compactor(log=log).run_once()
    log.first, log.end = 0, 1
    with pytest.raises(LogReplacedError, match="ends at offset 1, below the stored 2"):
        world.compactor(log=log).run_once()


@pytest.mark.parametrize("skip", [{0}, {1, 2}, {4}, {0, 1, 2, 3, 4}])
def test_what_a_log_holds_no_record_at_is_passed_and_not_lost(world: World, skip: set[int]) -> None:
    world.append(*[world.seal() for _ in range(5)])
    log = OtherLog(world.log)
    log.skip = skip
    compactor = world.compactor(log=log, free=False)
    reports = [compactor.run_once(), compactor.run_once()]
    assert sum(report.stored for report in reports) == 5 - len(skip)
    assert reports[1].lag == 0
    world.append(world.seal())
    reports.append(compactor.run_once())
    assert (reports[2].stored, reports[2].next_offset) == (1, 6)
    assert [report.gaps for report in reports] == [(), (), ()]


def test_what_a_log_loses_while_it_is_read_is_a_gap(world: World) -> None:
    world.append(*[world.seal() for _ in range(5)])

    class LosingLog(OtherLog):
        def read(self, start: int, limit_records: int, limit_bytes: int) -> list[LogRecord]:
            world.log.free(3)
            return super().read(start, limit_records, limit_bytes)

    report = world.compactor(log=LosingLog(world.log)).run_once()
    assert (report.stored, report.gaps) == (2, ((0, 3),))


@pytest.mark.parametrize("met_before", [False, True])
def test_of_two_compactors_on_one_log_one_wins(world: World, met_before: bool) -> None:
    if met_before:
        world.log.append([b"poison"])
        world.compactor().run_once()
    sealed = [world.seal() for _ in range(3)]
    world.append(*sealed)

    def serial() -> str:
        world.compactor(new_serial=lambda: "rival").run_once()
        return "late"

    with pytest.raises(ConflictError, match="another compactor moved this log"):
        world.compactor(new_serial=serial).run_once()
    assert ids(world.stored()) == ids(sealed)
    assert len(world.files()) == 1
    assert "rival" in next(iter(world.files()))
    assert world.compactor().run_once().read == 0


def test_one_trace_in_two_logs_at_once_is_stored_once(world: World) -> None:
    both, only_here, only_there = world.seal(), world.seal(), world.seal()
    world.append(both, only_here)
    other = SqliteLog(world.root / "log2", cap_bytes=1 << 30, bucket_s=600, clock=world.clock)
    other.append([encode_record(both), encode_record(only_there)])
    serials: list[str] = []

    def serial() -> str:
        if not serials:
            assert world.compactor(log=other, new_serial=lambda: "rival").run_once().stored == 2
        serials.append("x" * (len(serials) + 1))
        return serials[-1]

    report = world.compactor(new_serial=serial).run_once()
    assert (report.stored, report.duplicates) == (1, 1)
    assert len(serials) == 2
    assert ids(world.stored()) == ids([both, only_here, only_there])
    assert len(world.files()) == 2
    other.close()


def test_a_file_swept_before_its_commit_is_never_listed(world: World) -> None:
    # So that the next write is the batch's.
    world.compactor().run_once()
    sealed = world.seal()
    world.append(sealed)
    catalog = HookedCatalog(world.catalog.engine)
    sweeper = Sweeper(world.catalog, world.storage, clock=world.clock, grace_s=0.0)
    catalog.hook = sweeper.run_once
    with pytest.raises(ConflictError, match="swept before it was committed"):
        world.compactor(catalog=catalog).run_once()
    assert world.files() == set()
    assert world.stored() == []
    assert world.compactor(catalog=catalog).run_once().stored == 1
    assert world.stored() == [sealed]


def test_a_file_within_its_grace_is_left_to_its_writer(world: World) -> None:
    world.compactor().run_once()
    world.append(world.seal())
    catalog = HookedCatalog(world.catalog.engine)
    forever = Sweeper(world.catalog, world.storage, clock=world.clock, grace_s=10**10)
    catalog.hook = forever.run_once
    assert world.compactor(catalog=catalog).run_once().stored == 1
