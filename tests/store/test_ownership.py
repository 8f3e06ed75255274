"""A catalog never takes another's shards for files that nobody needs."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.errors import StoreError
from draftkeep.store import schema
from draftkeep.store.catalog import Catalog
from draftkeep.store.ownership import claim, require_own
from draftkeep.store.storage_local import LocalStorage
from draftkeep.store.sweeper import Sweeper
from tests.store.conftest import World
from tests.store.erasures import store


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


def test_a_round_that_finds_nothing_asks_the_storage_nothing(world: World) -> None:
    world.append(world.seal())
    world.compactor().run_once()
    Path(world.storage.mark_place).unlink()
    assert world.compactor().run_once().read == 0
    assert world.storage.read_mark() is None
    world.append(world.seal())
    assert world.compactor().run_once().stored == 1
    assert require_own(world.catalog, world.storage)


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


def test_a_second_place_gets_no_shard_and_no_mark(world: World) -> None:
    world.append(world.seal())
    world.compactor().run_once()
    world.append(world.seal())
    here, world.storage = world.storage, LocalStorage(world.root / "second" / "shards")
    with pytest.raises(StoreError, match=r"lists 1 shards, and .*second/shards holds none of them"):
        world.compactor().run_once()
    with pytest.raises(StoreError, match="check shards"):
        Sweeper(world.catalog, world.storage, clock=world.clock).run_once()
    assert world.storage.read_mark() is None
    assert world.files() == set()
    world.storage = here
    assert world.compactor().run_once().stored == 1
    assert len(world.stored()) == 2


def test_files_that_were_moved_bring_their_place_along(world: World) -> None:
    world.append(world.seal())
    world.compactor().run_once()
    here, there = world.storage, LocalStorage(world.root / "second" / "shards")
    for name in world.files():
        with there.create(name) as copy:
            copy.write((world.shards_dir / name).read_bytes())
    claim(world.catalog, there)
    claim(world.catalog, there)
    assert require_own(world.catalog, there)
    for look in (require_own, claim):
        with pytest.raises(StoreError, match="keeps its shards elsewhere"):
            look(world.catalog, here)


def test_a_person_may_say_that_an_empty_place_is_theirs(world: World) -> None:
    claim(world.catalog, world.storage)
    there = LocalStorage(world.root / "second" / "shards")
    with pytest.raises(StoreError, match="keeps its shards elsewhere") as caught:
        claim(world.catalog, there)
    line = str(caught.value).partition("write the line ")[2].partition(" into ")[0]
    assert line == world.storage.read_mark()
    there.write_mark(line)
    claim(world.catalog, there)


def test_a_mark_without_a_place_gets_one(world: World) -> None:
    claim(world.catalog, world.storage)
    mark = world.storage.read_mark() or ""
    # As an earlier version left it.
    world.storage.write_mark(mark.split()[0])
    with world.catalog.begin() as connection:
        connection.execute(sa.update(schema.identity).values(place=None))
    assert require_own(world.catalog, world.storage)
    claim(world.catalog, world.storage, new_place=lambda: b"P" * 16)
    assert world.storage.read_mark() == f"{mark.split()[0]} {(b'P' * 16).hex()}"


def test_who_was_killed_between_mark_and_catalog_goes_on(world: World) -> None:
    claim(world.catalog, world.storage)
    mark = world.storage.read_mark()
    with world.catalog.begin() as connection:
        connection.execute(sa.update(schema.identity).values(place=None))
    claim(world.catalog, world.storage)
    assert world.storage.read_mark() == mark
    claim(world.catalog, world.storage)


class Killed(BaseException):
    """What no handler in the package catches."""


class DyingCatalog(Catalog):
    """A catalog whose process dies before the commit in which the place would become known."""

    @contextmanager
    def begin(self, *, shared: bool = False) -> Iterator[Connection]:
        with super().begin(shared=shared) as connection:
            yield connection
            if connection.scalar(sa.select(schema.identity.c.place)) is not None:
                raise Killed


def test_who_was_killed_while_a_lost_mark_was_replaced_goes_on(world: World) -> None:
    store(world, world.seal())
    Path(world.storage.mark_place).unlink()
    with pytest.raises(Killed):
        claim(DyingCatalog(world.catalog.engine), world.storage)
    mark = world.storage.read_mark()
    assert mark is not None
    claim(world.catalog, world.storage)
    assert world.storage.read_mark() == mark
    assert require_own(world.catalog, world.storage)


@pytest.mark.parametrize("listed", [True, False])
def test_an_empty_disk_in_place_of_the_shards_is_refused(world: World, listed: bool) -> None:
    """A mount that failed leaves the directory it should have covered."""
    if listed:
        store(world, world.seal())
    else:
        claim(world.catalog, world.storage)
    world.append(world.seal())
    world.shards_dir.rename(world.root / "unmounted")
    world.shards_dir.mkdir()
    reason = "holds none of them" if listed else "keeps its shards elsewhere"
    with pytest.raises(StoreError, match=reason):
        world.compactor().run_once()
    with pytest.raises(StoreError, match=reason):
        Sweeper(world.catalog, world.storage, clock=world.clock).run_once()
    assert list(world.shards_dir.iterdir()) == []
    world.shards_dir.rmdir()
    (world.root / "unmounted").rename(world.shards_dir)
    assert world.compactor().run_once().stored == 1
    assert len(world.stored()) == 1 + listed


def test_a_mark_that_cannot_be_read_is_another_catalogs(world: World) -> None:
    claim(world.catalog, world.storage)
    Path(world.storage.mark_place).write_bytes(b"\xff\xfe\x00")
    for look in (require_own, claim):
        with pytest.raises(StoreError, match="belong to another catalog"):
            look(world.catalog, world.storage)


@pytest.mark.parametrize("places", [1, 2])
def test_of_many_that_start_at_once_on_an_empty_catalog_one_place_wins(
    world: World, places: int
) -> None:
    storages = [LocalStorage(world.root / f"place{n % places}" / "shards") for n in range(6)]
    together = threading.Barrier(len(storages))

    def start(storage: LocalStorage) -> str | None:
        with closing(Catalog.connect(world.catalog_url)) as catalog:
            together.wait()
            try:
                claim(catalog, storage)
            except StoreError:
                return None
            return storage.place

    with ThreadPoolExecutor(len(storages)) as pool:
        got = list(pool.map(start, storages))
    assert len({place for place in got if place}) == 1
    assert got.count(None) == 6 - 6 // places
    assert sum(storage.read_mark() is not None for storage in storages[:places]) == 1
