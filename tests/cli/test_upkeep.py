"""Upkeep: a chore that fails keeps no other from being done, nor do brokers that are away."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from draftkeep.cli import upkeep
from draftkeep.cli.compacting import compact_once
from draftkeep.cli.upkeep import do_upkeep
from draftkeep.config import Config, load_config
from draftkeep.errors import ConfigError, StoreError
from draftkeep.store.anchors import ISSUER, publish_anchor
from tests.deployment import TTL_S
from tests.serve.station import wait_for
from tests.store.conftest import World, make_world

ROOT = Path(__file__).resolve().parents[2]
NOBODY = '["127.0.0.1:1"]'


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = make_world(tmp_path, f"sqlite:///{tmp_path / 'catalog.db'}")
    publish_anchor(made.root, ISSUER, made.keyring.issuer_public)
    yield made
    made.close()


def configured(world: World, more: str = "") -> Config:
    path = world.root / "config.toml"
    path.write_text(f'state_dir = "{world.root}"\n{more}')
    return load_config(path, {})


def stored(world: World, traces: int) -> None:
    world.append(*(world.seal() for _ in range(traces)))
    assert world.compactor().run_once().stored == traces


def test_expired_shards_are_unlinked_and_not_rewritten(world: World) -> None:
    stored(world, 7)
    world.clock.now_s += TTL_S + 1
    done = do_upkeep(configured(world), world.catalog, world.storage, clock=world.clock)
    assert done.failures == []
    assert (done.counts["shards_expired"], done.counts["rows_rewritten_away"]) == (1, 0)
    assert world.files() == set()


@pytest.mark.parametrize("chore", ["Sweeper", "rewrite_erased", "drop_contaminated", "merge"])
def test_a_chore_that_fails_keeps_no_other_from_being_done(
    world: World, monkeypatch: pytest.MonkeyPatch, chore: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise StoreError("no")

    monkeypatch.setattr(upkeep, chore, fail)
    done = do_upkeep(configured(world), world.catalog, world.storage, clock=world.clock)
    assert [str(failure) for failure in done.failures] == ["no"]
    everything = {
        "shards_expired",
        "shards_missing",
        "orphans_removed",
        "rows_rewritten_away",
        "shards_damaged",
        "checkpoints_removed",
    }
    missing = {
        "Sweeper": {"shards_expired", "shards_missing", "orphans_removed"},
        "rewrite_erased": {"rows_rewritten_away"},
        "drop_contaminated": {"checkpoints_removed"},
        "merge": set(),
    }
    assert set(done.counts) == everything - missing[chore]


@pytest.fixture
def past(tmp_path: Path) -> Iterator[World]:
    """A world whose one shard has expired by the clock on the wall."""
    url = f"sqlite:///{tmp_path / 'catalog.db'}"
    made = make_world(tmp_path, url, now_s=time.time() - 2 * TTL_S)
    publish_anchor(made.root, ISSUER, made.keyring.issuer_public)
    stored(made, 2)
    yield made
    made.close()


def test_deadlines_are_kept_while_brokers_are_away(past: World) -> None:
    config = configured(past, f"[kafka]\nservers = {NOBODY}\ndeadline_s = 1\n")
    with pytest.raises(StoreError, match=r"127\.0\.0\.1:1"):
        compact_once(config)
    assert past.files() == set()


def test_a_member_keeps_deadlines_though_it_was_never_told_its_part(past: World) -> None:
    configured(past, f"[kafka]\nservers = {NOBODY}\ndeadline_s = 1\n")
    command = [sys.executable, "-m", "draftkeep", "compact", "--every", "0.2"]
    said, fails = past.root / "said", "compacting fails and is tried again"
    with said.open("w") as stderr:
        member = subprocess.Popen(
            [*command, "--config", str(past.root / "config.toml")],
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
    try:
        # In either order: the group may fail before or after the first round.
        wait_for(lambda: not past.files() or member.poll() is not None)
        wait_for(lambda: fails in said.read_text() or member.poll() is not None)
    finally:
        member.send_signal(signal.SIGTERM)
        member.wait(60)
    assert past.files() == set()
    assert member.returncode == 0
    assert said.read_text().count(fails) == 1


@pytest.mark.parametrize(
    "error",
    [
        PermissionError(13, "Permission denied", "/state/jobs/lock"),
        sa.exc.IntegrityError("INSERT", None, Exception("a value")),
        ConfigError("the password's file cannot be read"),
        KeyError("a value"),
    ],
)
def test_whatever_fails_outside_is_said_with_its_chore_and_stops_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    for _ in range(2):
        stored(world, 3)
    monkeypatch.setattr(upkeep, "drop_contaminated", fail)
    done = do_upkeep(configured(world), world.catalog, world.storage, clock=world.clock)
    (said,) = map(str, done.failures)
    assert said.startswith("removing checkpoints failed: ")
    assert "a value" not in said
    assert len(world.files()) == 1


def test_whoever_is_told_to_end_begins_no_other_chore(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []

    def watched(name: str) -> Callable[..., None]:
        def chore(*_: object, **__: object) -> None:
            told.append(name)
            raise StoreError("it did not answer for 20 s")

        return chore

    for name in ("claim", "delete_owed_records", "drop_contaminated"):
        monkeypatch.setattr(upkeep, name, watched(name))
    config = configured(world, f"[kafka]\nservers = {NOBODY}\n")
    parts = (config, world.catalog, world.storage)
    do_upkeep(*parts, clock=world.clock)
    assert told == ["claim", "delete_owed_records", "drop_contaminated"]
    told.clear()
    do_upkeep(*parts, clock=world.clock, stopped=lambda: bool(told))
    assert told == ["claim"]


def test_shards_of_another_catalog_are_left_alone_and_the_other_chores_done(world: World) -> None:
    for _ in range(2):
        stored(world, 3)
    world.clock.now_s += TTL_S + 1
    before = world.files()
    world.storage.write_mark("ab" * 16)
    done = do_upkeep(configured(world), world.catalog, world.storage, clock=world.clock)
    assert ["belong to another catalog" in str(failure) for failure in done.failures] == [True]
    assert set(done.counts) == {"checkpoints_removed"}
    assert world.files() == before


def test_upkeep_makes_no_place_for_jobs_of_another_user(world: World) -> None:
    done = do_upkeep(configured(world), world.catalog, world.storage, clock=world.clock)
    assert done.counts["checkpoints_removed"] == 0
    assert not (world.root / "jobs").exists()
