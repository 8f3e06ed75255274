"""A job's view of the store while others change it."""

import os
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from draftkeep.errors import KeyDestroyedError, StoreError
from draftkeep.store import schema
from draftkeep.store.erasure import erase_subject
from draftkeep.store.reader import iter_sealed
from tests.deployment import PERIOD_S, START_S, TTL_S
from tests.store.conftest import TARGET, World, ids


def fill(world: World, shards: int, **changes: Any) -> list[bytes]:
    sealed = []
    for _ in range(shards):
        batch = [world.seal(**changes) for _ in range(3)]
        sealed += batch
        world.append(*batch)
        world.compactor().run_once()
    return ids(sealed)


def test_tenant_target_and_deadline_select(world: World) -> None:
    first = fill(world, 1)
    fill(world, 1, tenant="birch")
    fill(world, 1, target=b"U" * 32)
    world.clock.now_s += PERIOD_S
    late = fill(world, 1)
    chosen = {"tenants": ["acme"], "target": TARGET}
    assert ids(world.stored(**chosen)) == sorted([*first, *late])
    assert ids(world.stored(**chosen, not_after_s=START_S + TTL_S)) == late
    assert world.stored(**chosen, not_after_s=START_S + PERIOD_S + TTL_S) == []
    assert world.stored(tenants=[], target=TARGET) == []


def test_a_merge_in_the_middle_neither_loses_nor_repeats(world: World) -> None:
    expected = fill(world, 4)
    reading = iter_sealed(
        world.catalog, world.storage, tenants=None, target=TARGET, not_after_s=world.clock()
    )
    found = [next(reading) for _ in range(4)]
    assert world.merge(10**6).replaced == 4
    found += reading
    assert ids(found) == expected


def test_a_replaced_shard_whose_file_still_lies_there_is_not_believed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = fill(world, 4)
    reading = iter_sealed(
        world.catalog, world.storage, tenants=None, target=TARGET, not_after_s=world.clock()
    )
    found = [next(reading)]
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda *_, **__: None)
        assert world.merge(10**6).replaced == 4
    assert len(world.files()) == 5
    found += reading
    assert ids(found) == expected


def test_an_erasure_in_the_middle_holds_from_the_next_shard_on(world: World) -> None:
    anonymous = fill(world, 1)
    fill(world, 3, subject="ann")
    reading = iter_sealed(
        world.catalog, world.storage, tenants=None, target=TARGET, not_after_s=world.clock()
    )
    found = [next(reading)]
    erase_subject(world.catalog, world.keyring, tenant="acme", subject="ann", now_s=world.clock())
    assert world.rewrite_erased().rows_removed == 9
    found += reading
    assert ids(found) == anonymous


def test_erased_rows_are_given_only_on_request_and_do_not_open(world: World) -> None:
    named = fill(world, 1, subject="ann")
    erase_subject(world.catalog, world.keyring, tenant="acme", subject="ann", now_s=world.clock())
    assert world.stored() == []
    left = world.stored(include_erased=True)
    assert ids(left) == named
    for item in left:
        with pytest.raises(KeyDestroyedError):
            world.opener().open(item)


def test_a_listed_shard_without_a_file_is_an_error_and_not_an_end(world: World) -> None:
    fill(world, 2)
    names = sorted(world.files())
    (world.shards_dir / names[0]).unlink()
    with pytest.raises(StoreError, match="listed but its file is not there"):
        world.stored()


def test_a_shard_taken_off_the_list_is_passed_over(world: World) -> None:
    fill(world, 1)
    last = fill(world, 1)
    reading = iter_sealed(
        world.catalog, world.storage, tenants=None, target=TARGET, not_after_s=world.clock()
    )
    found = [next(reading)]
    with world.catalog.begin() as connection:
        newest = connection.scalar(sa.select(sa.func.max(schema.shards.c.id)))
        gone = connection.scalar(
            sa.select(schema.shards.c.name).where(schema.shards.c.id == newest)
        )
        connection.execute(sa.delete(schema.trace_ids).where(schema.trace_ids.c.shard == newest))
        connection.execute(sa.delete(schema.shards).where(schema.shards.c.id == newest))
    os.unlink(world.shards_dir / str(gone))
    found += reading
    assert len(found) == 3
    assert not set(ids(found)) & set(last)
