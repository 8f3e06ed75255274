"""The whole store with its shards in a bucket: everything that a directory is asked for."""

import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from draftkeep.errors import ConflictError, StoreError
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.store import schema
from draftkeep.store.audit import AuditSession
from draftkeep.store.catalog import Catalog
from draftkeep.store.check import check_catalog, repair_catalog
from draftkeep.store.compactor import Compactor
from draftkeep.store.ownership import claim
from draftkeep.store.reader import iter_sealed
from draftkeep.store.rewriter import merge, random_serial
from draftkeep.store.storage import Storage
from draftkeep.store.storage_local import LocalStorage
from draftkeep.store.storage_objects import ObjectStorage
from draftkeep.store.sweeper import Sweeper
from tests.deployment import TTL_S
from tests.store.conftest import HookedCatalog, World, ids, make_world
from tests.store.erasures import erase


@pytest.fixture
def remote(tmp_path: Path, object_storage: ObjectStorage) -> Iterator[World]:
    """A world on SQLite whose shards are objects."""
    made = make_world(tmp_path, f"sqlite:///{tmp_path / 'catalog.db'}")
    made.storage = object_storage
    yield made
    made.close()


def fill(world: World, shards: int, **changes: Any) -> list[bytes]:
    sealed = []
    for _ in range(shards):
        batch = [world.seal(**changes) for _ in range(3)]
        sealed += batch
        world.append(*batch)
        world.compactor().run_once()
    return ids(sealed)


def damage(world: World, *, digests: bool = True) -> dict[str, int]:
    found = check_catalog(
        world.catalog, world.storage, logs=[world.log], now_s=world.clock(), digests=digests
    )
    return {finding.rule: finding.broken for finding in found if finding.broken}


def put(storage: Storage, name: str, data: bytes) -> None:
    with storage.create(name) as stream:
        stream.write(data)


def test_traces_are_stored_once_merged_erased_and_expired(remote: World) -> None:
    kept = fill(remote, 3)
    again = remote.stored()[0]
    remote.append(again)
    assert remote.compactor().run_once().duplicates == 1
    fill(remote, 2, subject="ann")
    assert remote.merge(10**6).replaced == 5
    assert len(remote.files()) == 1
    erase(remote, "ann")
    assert ids(remote.stored()) == kept
    assert remote.rewrite_erased().rows_removed == 6
    assert ids(remote.stored(include_erased=True)) == kept
    assert {remote.opener().open(item) for item in remote.stored()} == {b"body"}
    assert damage(remote) == {}
    remote.clock.now_s += TTL_S
    assert Sweeper(remote.catalog, remote.storage, clock=remote.clock).run_once().shards == 1
    assert remote.files() == set()
    assert damage(remote) == {}


def test_a_transaction_that_is_lost_leaves_no_object(remote: World) -> None:
    remote.append(remote.seal())
    catalog = HookedCatalog(remote.catalog.engine)
    claim(remote.catalog, remote.storage)
    catalog.hook = lambda: remote.compactor().run_once()
    with pytest.raises(ConflictError):
        remote.compactor(catalog=catalog).run_once()
    assert len(remote.files()) == 1
    assert len(remote.stored()) == 1


def test_an_object_swept_before_its_commit_is_not_listed(remote: World) -> None:
    remote.append(remote.seal())
    catalog = HookedCatalog(remote.catalog.engine)
    claim(remote.catalog, remote.storage)
    catalog.hook = lambda: remote.storage.remove(remote.files())
    with pytest.raises(ConflictError, match="swept before it was committed"):
        remote.compactor(catalog=catalog).run_once()
    assert remote.compactor().run_once().stored == 1


def test_objects_that_nothing_lists_go_by_their_own_date(remote: World) -> None:
    kept = fill(remote, 1)
    (listed,) = remote.files()
    put(remote.storage, "1-54545454-lost.parquet", b"half a shard")
    put(remote.storage, "README.txt", b"read me")
    (modified_s,) = {
        file.modified_s for file in remote.storage.list() if file.name.endswith("-lost.parquet")
    }
    now_s = modified_s + 59
    sweeper = Sweeper(remote.catalog, remote.storage, clock=lambda: now_s, grace_s=60.0)
    # Its hand clock is years behind the store's dates, which are what counts here.
    remote.clock.now_s = now_s
    assert sweeper.run_once().orphans == 0
    now_s = modified_s + 60
    assert sweeper.run_once().orphans == 1
    assert remote.files() == {listed, "README.txt"}
    assert ids(remote.stored()) == kept


def test_a_lost_and_an_altered_object_are_found(remote: World) -> None:
    fill(remote, 2)
    lost, altered = sorted(remote.files())
    with remote.storage.open(altered) as file:
        data = bytearray(file.read())
    remote.storage.remove([lost])
    data[len(data) // 2] ^= 1
    put(remote.storage, altered, bytes(data))
    assert damage(remote, digests=False) == {"every listed file is there": 1}
    rules = {"every listed file is there": 1, "every file has the digest it was listed with": 1}
    assert damage(remote) == rules
    found = check_catalog(remote.catalog, remote.storage, logs=[], now_s=remote.clock())
    repair_catalog(remote.catalog, remote.storage, found, now_s=remote.clock())
    assert damage(remote) == rules
    sweeper = Sweeper(remote.catalog, remote.storage, clock=remote.clock)
    assert sweeper.run_once().missing == (lost,)
    with pytest.raises(StoreError, match="listed but its file is not there"):
        remote.stored()


def test_another_catalog_sweeps_and_compacts_nothing(remote: World, tmp_path: Path) -> None:
    fill(remote, 1)
    before = remote.files()
    with closing(Catalog.open(tmp_path / "other" / "catalog.db")) as stranger:
        with pytest.raises(StoreError, match=r"s3://bucket-.* belong to another catalog"):
            Sweeper(stranger, remote.storage, clock=remote.clock).run_once()
        with pytest.raises(StoreError, match=r"remove s3://.*/draftkeep\.catalog"):
            remote.compactor(catalog=stranger).run_once()
        mark = remote.storage.mark_place.removeprefix("s3://")
        remote.storage.filesystem.delete_file(mark)
        with pytest.raises(StoreError, match="lists none"):
            claim(stranger, remote.storage)
    assert remote.files() == before
    claim(remote.catalog, remote.storage)
    assert remote.storage.read_mark() is not None


def test_an_auditor_asks_objects(remote: World) -> None:
    fill(remote, 2, domain="law")
    with AuditSession(remote.catalog, remote.storage, now_s=remote.clock()) as session:
        count = "SELECT count(*), sum(positions) FROM traces WHERE domain = 'law'"
        assert session.query(count).rows == ((6, 30),)
        remote.merge(10**6)
        assert session.query(count).rows == ((6, 30),)
        remote.storage.remove(remote.files())
        with pytest.raises(
            StoreError, match=r"1 listed shards, .* the first, are not in s3://.*; check that"
        ):
            session.query(count)


def test_a_shard_replaced_while_it_is_read_is_read_on_elsewhere(
    remote: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftkeep.store.shard.ROW_GROUP_ROWS", 1)
    expected = fill(remote, 2)
    reading = iter_sealed(
        remote.catalog, remote.storage, tenants=None, target=None, not_after_s=remote.clock()
    )
    opened: list[str] = []
    really_open = ObjectStorage.open

    def opening(storage: ObjectStorage, name: str) -> Any:
        opened.append(name)
        return really_open(storage, name)

    # In the middle of a file: its first row group was read, the others are only asked for later.
    found = [next(reading)]
    assert remote.merge(10**6).replaced == 2
    monkeypatch.setattr(ObjectStorage, "open", opening)
    found += reading
    assert ids(found) == expected
    assert opened == list(remote.files())


@pytest.mark.parametrize("where", ["directory", "bucket"])
def test_readers_beside_a_merger_that_never_rests_get_everything_once(
    where: str, remote: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftkeep.store.shard.ROW_GROUP_ROWS", 2)
    if where == "directory":
        remote.storage = LocalStorage(remote.shards_dir)
    fill(remote, 3)
    remote.append(*(remote.seal() for _ in range(10)))
    merged: list[int] = []
    merger = threading.Thread(target=lambda: merged.extend(compact_and_merge(remote)))
    merger.start()
    readings = 0
    while merger.is_alive():
        stored = known(remote)
        found = ids(remote.stored())
        assert len(found) == len(set(found))
        assert set(found) >= stored
        readings += 1
    merger.join()
    assert readings > 1
    assert len(merged) == 10
    assert set(ids(remote.stored())) == known(remote)
    assert len(known(remote)) == 19
    assert len(remote.files()) == 1


def compact_and_merge(world: World) -> Iterator[int]:
    """Store what the log holds trace by trace, and join all shards after each."""
    with (
        closing(Catalog.connect(world.catalog_url)) as catalog,
        closing(SqliteLog.open_reader(world.root / "log")) as log,
    ):
        compactor = Compactor(
            log,
            catalog,
            world.storage,
            clock=world.clock,
            issuer_public=world.keyring.issuer_public,
            limit_records=1,
        )
        while compactor.run_once().read:
            report = merge(
                catalog,
                world.storage,
                target_bytes=10**6,
                now_s=world.clock(),
                new_serial=random_serial,
            )
            yield report.replaced


def known(world: World) -> set[bytes]:
    with world.catalog.read() as connection:
        return set(connection.scalars(sa.select(schema.trace_ids.c.trace_id)))
