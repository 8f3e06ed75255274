"""A catalog never takes another's shards for files that nobody needs."""

import os
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa

from draftkeep.errors import StoreError
from draftkeep.store import schema
from draftkeep.store.catalog import Catalog
from draftkeep.store.ownership import claim, require_own
from draftkeep.store.sweeper import Sweeper
from tests.store.conftest import World


@pytest.fixture
def stranger(world: World, new_catalog_url: Callable[[], str]) -> Iterator[Catalog]:
    """Another, empty catalog beside a world with one old shard."""
    world.append(world.seal())
    (name,) = world.compactor().run_once().shards
    os.utime(world.shards_dir / name, (0, 0))
    with closing(Catalog.connect(new_catalog_url())) as other:
        with other.begin() as connection:
            # A copied database has its original's name.
            connection.execute(sa.update(schema.identity).values(id=b"stranger"))
        yield other


@pytest.mark.parametrize("marked", [True, False])
def test_another_catalog_sweeps_and_compacts_nothing(
    world: World, stranger: Catalog, marked: bool
) -> None:
    if not marked:
        Path(world.storage.mark_place).unlink()
    before = world.files()
    world.append(world.seal())
    reason = "belong to another catalog" if marked else "lists none"
    with pytest.raises(StoreError, match=reason):
        Sweeper(stranger, world.storage, clock=world.clock).run_once()
    with pytest.raises(StoreError, match=reason):
        world.compactor(catalog=stranger).run_once()
    assert world.files() == before
    assert len(world.stored()) == 1
    assert world.compactor().run_once().stored == 1


def test_a_catalog_from_before_there_were_marks_adopts_its_shards(world: World) -> None:
    world.append(world.seal())
    world.compactor().run_once()
    Path(world.storage.mark_place).unlink()
    assert not require_own(world.catalog, world.storage)
    claim(world.catalog, world.storage)
    assert require_own(world.catalog, world.storage)
    assert Sweeper(world.catalog, world.storage, clock=world.clock).run_once().missing == ()


def test_a_mark_that_was_removed_on_purpose_lets_a_rebuilt_catalog_in(
    world: World, stranger: Catalog
) -> None:
    with pytest.raises(StoreError, match="remove"):
        claim(stranger, world.storage)
    Path(world.storage.mark_place).unlink()
    for name in world.files():
        (world.shards_dir / name).unlink()
    claim(stranger, world.storage)
    assert require_own(stranger, world.storage)
    with pytest.raises(StoreError, match="belong to another catalog"):
        require_own(world.catalog, world.storage)


def test_unfinished_files_are_nobodys(world: World) -> None:
    world.shards_dir.mkdir()
    (world.shards_dir / ".tmp-1-54545454-a.parquet").write_bytes(b"half")
    claim(world.catalog, world.storage)
    assert require_own(world.catalog, world.storage)
