"""Deadlines and orphans: what goes, when, and what must stay."""

import os

import pytest
import sqlalchemy as sa

from draftkeep.store import schema
from draftkeep.store.sweeper import Sweeper
from tests.store.conftest import PERIOD_S, START_S, TTL_S, World


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
    size = sum(path.stat().st_size for path in world.shards_dir.iterdir())

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
