"""A shard that is damaged, lost or at odds with the catalog: said, left alone, in nobody's way."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

from draftkeep.errors import ShardError
from draftkeep.store import schema
from draftkeep.store.check import check_catalog
from draftkeep.store.rewriter import RewriteReport, merge, random_serial, rewrite_erased
from draftkeep.store.shard import read_keys, read_shard
from draftkeep.store.shard_merge import merge_tables
from draftkeep.store.shard_rows import file_digest
from draftkeep.store.storage_local import LocalStorage
from tests.deployment import PERIOD_S
from tests.store.conftest import World
from tests.store.erasures import erase

Damage = Callable[[Path], None]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def flip_ciphertext(path: Path) -> None:
    """One bit of a sealed body: every value in the file is still a value."""
    (body, *_) = pq.read_table(path).column("ciphertext").to_pylist()
    data = path.read_bytes()
    place = data.index(body) + len(body) // 2
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])


DAMAGES = pytest.mark.parametrize("damage", [cut, zero, flip_ciphertext])


def fill(world: World, shards: int) -> list[str]:
    """So many shards of one bucket, each with a trace of ann and one of bob; their names."""
    names: list[str] = []
    for _ in range(shards):
        world.append(world.seal(b"b" * 500, subject="ann"), world.seal(subject="bob"))
        names += world.compactor().run_once().shards
    return names


def merged(world: World, storage: LocalStorage | None = None, **stop: object) -> RewriteReport:
    return merge(
        world.catalog,
        storage or world.storage,
        target_bytes=10**6,
        now_s=world.clock(),
        new_serial=random_serial,
        **stop,  # type: ignore[arg-type]
    )


def rewritten(world: World, **stop: object) -> RewriteReport:
    return rewrite_erased(
        world.catalog,
        world.storage,
        now_s=world.clock(),
        new_serial=random_serial,
        **stop,  # type: ignore[arg-type]
    )


def broken(world: World) -> dict[str, tuple[str, ...]]:
    found = check_catalog(world.catalog, world.storage, logs=[], now_s=world.clock())
    return {finding.rule: finding.examples for finding in found if finding.broken}


@DAMAGES
def test_a_merge_leaves_a_damaged_shard_as_it_is_and_joins_the_others(
    world: World, damage: Damage, caplog: pytest.LogCaptureFixture
) -> None:
    names = fill(world, 4)
    path = world.shards_dir / names[1]
    damage(path)
    left = path.read_bytes()
    report = merged(world)
    assert (report.replaced, report.written, report.damaged) == (3, 1, 1)
    assert path.read_bytes() == left
    assert len(world.files()) == 2
    (said,) = [item for item in caplog.records if item.name == "draftkeep.store.rewriter"]
    assert said.levelname == "ERROR"
    assert names[1] in said.getMessage()
    assert [examples for examples in broken(world).values()] == [(names[1],)]


@DAMAGES
def test_an_erasure_reaches_every_shard_but_the_damaged_one(world: World, damage: Damage) -> None:
    names = fill(world, 3)
    erase(world, "ann")
    damage(world.shards_dir / names[0])
    report = rewritten(world)
    assert (report.replaced, report.rows_removed, report.damaged) == (2, 2, 1)
    assert world.files() & set(names) == {names[0]}
    assert names[0] in broken(world)["no shard holds erased rows"]


def test_bytes_that_were_listed_and_are_no_shard_are_said(world: World) -> None:
    """The digest is right, and PyArrow cannot read it: in the footer, and in a page."""
    names = fill(world, 2)
    erase(world, "ann")
    for name, place in zip(names, (-20, 300), strict=True):
        path = world.shards_dir / name
        data = bytearray(path.read_bytes())
        data[place : place + 20] = bytes(20)
        path.write_bytes(data)
        digest = file_digest(world.storage, name)
        with world.catalog.begin() as connection:
            row = sa.update(schema.shards).where(schema.shards.c.name == name)
            connection.execute(row.values(sha256=digest))
    report = rewritten(world)
    assert (report.replaced, report.damaged) == (0, 2)
    assert world.files() == set(names)


def test_no_error_of_pyarrow_leaves_the_readers_of_a_shard(world: World, tmp_path: Path) -> None:
    (name,) = fill(world, 1)
    data = (world.shards_dir / name).read_bytes()
    storage = LocalStorage(tmp_path / "damaged")
    refused = 0
    for place in range(4, len(data) - 20, 29):
        with storage.create(name) as stream:
            stream.write(data[:place] + bytes(20) + data[place + 20 :])
        for read in (
            lambda: read_keys(storage, name),
            lambda: list(merge_tables(storage, [name, name], dead=set())),
        ):
            try:
                read()
            except ShardError:
                refused += 1
    assert refused > 20
    with storage.create(name) as stream:
        stream.write(data[:-40] + bytes(40))
    with pytest.raises(ShardError, match="damaged, cut short or no shard"):
        list(read_shard(storage, name))


def test_a_file_with_other_rows_than_the_catalog_has_is_not_hidden_by_a_merge(
    world: World,
) -> None:
    names = fill(world, 2)
    with world.catalog.begin() as connection:
        one = connection.scalars(sa.select(schema.trace_ids.c.trace_id)).first()
        connection.execute(sa.delete(schema.trace_ids).where(schema.trace_ids.c.trace_id == one))
    report = merged(world)
    assert (report.replaced, report.damaged) == (0, 2)
    assert world.files() == set(names)
    assert "a shard has as many trace ids as rows" in broken(world)


class Watched(LocalStorage):
    """A directory that notes which files it was asked for."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.asked: set[str] = set()

    def exists(self, name: str) -> bool:
        self.asked.add(name)
        return super().exists(name)

    @contextmanager
    def open(self, name: str) -> Iterator[pa.NativeFile]:
        self.asked.add(name)
        with super().open(name) as file:
            yield file


def test_a_merge_asks_only_for_files_that_it_merges(world: World) -> None:
    lone = fill(world, 1)
    world.clock.now_s += PERIOD_S
    pair = fill(world, 2)
    storage = Watched(world.shards_dir)
    assert merged(world, storage).replaced == 2
    assert storage.asked >= set(pair)
    assert not storage.asked & set(lone)


def test_a_pass_that_is_stopped_ends_between_two_shards(world: World) -> None:
    fill(world, 3)
    erase(world, "ann")
    asked = iter([False, True])
    assert rewritten(world, stopped=lambda: next(asked)).replaced == 1
    assert merged(world, stopped=lambda: True).replaced == 0
    assert rewritten(world).replaced == 2
    assert merged(world).replaced == 3
