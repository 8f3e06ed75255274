"""Deadlines and orphans: what goes, when, and what must stay."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from draftkeep.errors import StoreError
from draftkeep.store import schema
from draftkeep.store import sweeper as sweeping
from draftkeep.store.check import check_catalog
from draftkeep.store.storage_local import LocalStorage
from draftkeep.store.sweeper import Sweeper
from tests.deployment import PERIOD_S, START_S, TTL_S
from tests.store.conftest import World, make_world


def sweeper(world: World, grace_s: float = 3600.0) -> Sweeper:
    return Sweeper(world.catalog, world.storage, clock=world.clock, grace_s=grace_s)


def count(world: World, table: sa.Table) -> int:
    with world.catalog.read() as connection:
        return connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0


def test_a_bucket_goes_as_a_whole_at_its_deadline_and_not_before(world: World) -> None:
    world.append(world.seal(), world.seal())
    world.clock.now_s += PERIOD_S
    late = world.seal()
    world.append(late)
    world.log.append([b"poison"])
    world.compactor().run_once()
    size = sum(file.size_bytes for file in world.storage.list())

    world.clock.now_s = START_S + TTL_S - 1
    report = sweeper(world).run_once()
    assert (report.shards, report.bytes_freed, report.trace_ids, report.orphans) == (0, 0, 0, 0)

    world.clock.now_s = START_S + TTL_S
    report = sweeper(world).run_once()
    assert (report.shards, report.trace_ids, report.missing) == (1, 2, ())
    assert 0 < report.bytes_freed < size
    assert world.stored() == [late]
    assert count(world, schema.dead_letters) == 1

    world.clock.now_s = START_S + TTL_S + PERIOD_S + 60
    report = sweeper(world).run_once()
    assert (report.shards, report.dead_letters) == (1, 1)
    assert world.files() == set()
    for table in (schema.shards, schema.trace_ids, schema.dead_letters):
        assert count(world, table) == 0


def test_orphans_go_after_their_grace_and_nothing_else_does(world: World) -> None:
    kept = world.seal()
    world.append(kept)
    (listed,) = world.compactor().run_once().shards
    names = ["1-54545454-old.parquet", ".tmp-1-54545454-old.parquet", "1-54545454-new.parquet"]
    for name in [*names, "README.txt"]:
        path = world.shards_dir / name
        path.write_bytes(b"half a shard")
        age_s = 10 if "new" in name else 3601
        os.utime(path, (0, world.clock() - age_s))
    os.utime(world.shards_dir / listed, (0, 0))

    assert sweeper(world).run_once().orphans == 2
    assert world.files() == {listed, "1-54545454-new.parquet", "README.txt"}
    world.clock.now_s += 3600
    assert sweeper(world).run_once().orphans == 1
    assert sweeper(world).run_once().orphans == 0
    assert world.stored() == [kept]


def test_a_crash_between_the_commit_and_the_unlink_is_finished(world: World) -> None:
    world.append(world.seal())
    (name,) = world.compactor().run_once().shards
    with world.catalog.begin() as connection:
        connection.execute(sa.delete(schema.trace_ids))
        connection.execute(sa.delete(schema.shards))
    os.utime(world.shards_dir / name, (0, 0))
    assert sweeper(world).run_once().orphans == 1
    assert world.files() == set()


def test_a_listed_file_that_is_not_there_is_reported(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.append(world.seal())
    (name,) = world.compactor().run_once().shards
    (world.shards_dir / name).unlink()
    assert sweeper(world).run_once().missing == (name,)
    (said,) = [item for item in caplog.records if item.name == "draftkeep.store.sweeper"]
    assert said.levelname == "ERROR"
    assert name in said.getMessage()


def test_a_sweep_before_the_first_shard_finds_nothing(world: World) -> None:
    report = sweeper(world).run_once()
    assert (report.shards, report.orphans, report.missing) == (0, 0, ())


@pytest.fixture
def postgres_world(tmp_path: Path, postgres_catalog_url: str) -> Iterator[World]:
    made = make_world(tmp_path, postgres_catalog_url)
    yield made
    made.close()


def past_deadline(world: World, traces: int) -> None:
    """So many traces in one shard, and a clock that says they are to go."""
    world.append(*(world.seal() for _ in range(traces)))
    world.compactor().run_once()
    world.clock.now_s = START_S + TTL_S


def test_others_write_while_a_bucket_expires(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeping, "_BATCH_IDS", 2)
    past_deadline(world, 5)
    left: list[int] = []
    broken: set[str] = set()

    def pause() -> None:
        left.append(count(world, schema.trace_ids))
        # A new period, which takes the writers' lock.
        world.clock.now_s += PERIOD_S
        world.seal()
        assert world.stored() == []
        found = check_catalog(world.catalog, world.storage, logs=[], now_s=world.clock())
        broken.update(finding.rule for finding in found if finding.broken)

    chore = Sweeper(world.catalog, world.storage, clock=lambda: START_S + TTL_S, pause=pause)
    report = chore.run_once()
    assert (report.trace_ids, report.shards, left) == (5, 1, [3, 1])
    # Nothing is said that a sweep does not mend.
    assert broken == {"no shard is past its deadline", "no trace id is past its deadline"}


def test_an_expiry_that_is_cut_short_is_finished_by_the_next(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "_BATCH_IDS", 2)
    past_deadline(world, 5)

    def die() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Sweeper(world.catalog, world.storage, clock=world.clock, pause=die).run_once()
    assert (count(world, schema.trace_ids), count(world, schema.shards)) == (3, 1)
    assert world.stored() == []
    report = sweeper(world).run_once()
    assert (report.trace_ids, report.shards) == (3, 1)
    assert world.files() == set()


def test_what_a_compactor_with_a_late_clock_stores_meanwhile_goes_too(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "_BATCH_IDS", 2)
    # Sealed in its period, and in the log until after the deadline.
    late = world.seal()
    past_deadline(world, 3)

    waiting = [late]

    def store_late() -> None:
        if not waiting:
            return
        world.append(waiting.pop())
        assert world.compactor(clock=lambda: START_S + TTL_S - 1).run_once().stored == 1

    chore = Sweeper(world.catalog, world.storage, clock=world.clock, pause=store_late)
    report = chore.run_once()
    assert (report.shards, report.trace_ids) == (2, 4)
    assert world.files() == set()


def test_expiry_waits_for_no_compactor_that_commits(postgres_world: World) -> None:
    past_deadline(postgres_world, 3)
    with postgres_world.catalog.begin(shared=True):
        assert sweeper(postgres_world).run_once().shards == 1


class Removals(LocalStorage):
    """A directory that notes what is removed together, and does something after that."""

    def __init__(self, world: World) -> None:
        super().__init__(world.shards_dir)
        self.sizes: list[int] = []
        self.url: str | None = None

    def remove(self, names: Iterable[str]) -> None:
        together = list(names)
        super().remove(together)
        self.sizes += [len(together)] * bool(together)
        if self.url is not None:
            # The database gives the lock of a session away that it takes for dead.
            engine = sa.create_engine(self.url)
            with engine.begin() as connection:
                connection.execute(
                    sa.text(
                        "SELECT pg_terminate_backend(pid) FROM pg_locks "
                        "WHERE locktype = 'advisory' AND granted"
                    )
                )
            engine.dispose()


def leave_orphans(world: World, number: int) -> None:
    for index in range(number):
        path = world.shards_dir / f"1-54545454-{index}.parquet"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"half a shard")
        os.utime(path, (0, 0))


def test_orphans_go_a_few_at_a_time(world: World) -> None:
    world.append(world.seal())
    world.compactor().run_once()
    leave_orphans(world, 40)
    storage, pauses = Removals(world), []
    chore = Sweeper(
        world.catalog, storage, clock=world.clock, pause=lambda: pauses.append(world.seal())
    )
    assert chore.run_once().orphans == 40
    assert max(storage.sizes) <= 16
    assert len(pauses) == len(storage.sizes) - 1 > 0


def test_a_sweep_that_lost_its_lock_removes_no_more(postgres_world: World) -> None:
    world = postgres_world
    world.append(world.seal())
    world.compactor().run_once()
    leave_orphans(world, 40)
    storage = Removals(world)
    storage.url = world.catalog_url
    with pytest.raises(StoreError, match="cannot be used"):
        Sweeper(world.catalog, storage, clock=world.clock).run_once()
    assert storage.sizes == [16]
    storage.url = None
    assert Sweeper(world.catalog, storage, clock=world.clock).run_once().orphans == 24
