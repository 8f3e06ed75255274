"""Small shards become one; and all of it runs where no key is."""

import subprocess
import sys
from pathlib import Path

import pytest

from draftkeep.errors import ConflictError
from draftkeep.store.compactor import Compactor
from draftkeep.store.storage_local import LocalStorage
from tests.deployment import PERIOD_S
from tests.store.conftest import HookedCatalog, World, ids
from tests.store.erasures import erase, store

COMPACT = """
import builtins, io, os, sys
from pathlib import Path
root, issuer, now = Path(sys.argv[1]), bytes.fromhex(sys.argv[2]), float(sys.argv[3])
opened = []
sys.addaudithook(lambda name, args: opened.append(str(args[0])) if name == "open" else None)
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.store.audit import AuditSession
from draftkeep.store.catalog import Catalog
from draftkeep.store.compactor import Compactor
from draftkeep.store.rewriter import merge, random_serial, rewrite_erased
from draftkeep.store.storage_local import LocalStorage
from draftkeep.store.sweeper import Sweeper
log = SqliteLog(root / "log", cap_bytes=1 << 30, bucket_s=600, clock=lambda: now)
catalog = Catalog.connect(sys.argv[4])
storage = LocalStorage(root / "shards")
compactor = Compactor(log, catalog, storage, clock=lambda: now, issuer_public=issuer)
print(compactor.run_once().stored)
merge(catalog, storage, target_bytes=1 << 20, now_s=now, new_serial=random_serial)
rewrite_erased(catalog, storage, now_s=now, new_serial=random_serial)
Sweeper(catalog, storage, clock=lambda: now).run_once()
with AuditSession(catalog, storage, now_s=now) as session:
    print(session.query("SELECT count(*) FROM traces").rows[0][0])
log.close()
catalog.close()
holders = ["policies.keyring", "policies.kek", "policies.job_keys", "policies.node_keys"]
holders += ["policies.subject_rows", "policies.issuer", "ingest.envelope"]
print([name for name in holders if f"draftkeep.{name}" in sys.modules])
print([path for path in opened if "/keys" in path])
"""


def test_compactor_sweeper_and_audit_run_where_no_key_is(world: World) -> None:
    sealed = [world.seal(b"secret") for _ in range(5)]
    world.append(*sealed)
    world.log.close()
    hidden = world.root / "elsewhere"
    (world.root / "keys").rename(hidden)
    arguments = [str(world.root), world.keyring.issuer_public.hex(), str(world.clock())]
    arguments.append(world.catalog_url)
    done = subprocess.run(
        [sys.executable, "-c", COMPACT, *arguments], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["5", "5", "[]", "[]"]
    hidden.rename(world.root / "keys")
    assert {world.opener().open(item) for item in world.stored()} == {b"secret"}


def test_small_shards_of_one_bucket_become_one(world: World) -> None:
    sealed = []
    for _ in range(4):
        sealed.append(world.seal(b"b" * 1000))
        world.append(sealed[-1])
        world.compactor().run_once()
    world.clock.now_s += PERIOD_S
    late = world.seal()
    world.append(late)
    world.compactor().run_once()
    assert len(world.files()) == 5
    report = world.merge(10**6)
    assert (report.replaced, report.written, report.rows_removed) == (4, 1, 0)
    assert report.bytes_freed > 3 * 1168
    assert len(world.files()) == 2
    assert ids(world.stored()) == ids([*sealed, late])
    assert world.merge(10**6).replaced == 0
    world.append(sealed[0])
    assert world.compactor().run_once().duplicates == 1


def test_merging_keeps_to_the_size_asked_for(world: World) -> None:
    for _ in range(6):
        world.append(world.seal(b"b" * 3000))
        world.compactor().run_once()
    sizes = [file.size_bytes for file in world.storage.list()]
    report = world.merge(3 * max(sizes))
    assert (report.replaced, report.written) == (6, 2)
    assert len(world.stored()) == 6
    assert world.merge(min(sizes)).replaced == 0


def test_a_large_shard_waits_for_enough_small_ones(world: World) -> None:
    large = world.seal(b"b" * 120_000)
    world.append(large)
    world.compactor().run_once()
    small = []

    def add_small() -> None:
        small.append(world.seal())
        world.append(small[-1])
        world.compactor().run_once()

    (name,) = world.files()
    add_small()
    assert world.merge(10**6).replaced == 0
    add_small()
    assert world.merge(10**6).replaced == 2
    assert name in world.files()
    for _ in range(12):
        add_small()
    assert world.merge(10**6).replaced == 14
    assert len(world.files()) == 1
    assert ids(world.stored()) == ids([large, *small])


def test_a_shard_replaced_by_another_process_is_left_to_it(world: World) -> None:
    for _ in range(2):
        world.append(world.seal())
        world.compactor().run_once()

    def serial() -> str:
        world.merge(10**6, new_serial=lambda: "rival")
        return "late"

    with pytest.raises(ConflictError, match="replaced"):
        world.merge(10**6, new_serial=serial)
    assert len(world.files()) == 1
    assert len(world.stored()) == 2


def test_a_shard_replaced_while_its_copy_was_written_is_left_to_it(world: World) -> None:
    for _ in range(2):
        world.append(world.seal())
        world.compactor().run_once()
    catalog = HookedCatalog(world.catalog.engine)
    catalog.hook = lambda: world.merge(10**6)
    with pytest.raises(ConflictError, match="replaced or swept"):
        world.merge(10**6, catalog=catalog)
    assert len(world.files()) == 1
    assert len(world.stored()) == 2


def test_a_copy_of_what_was_erased_meanwhile_is_never_listed(world: World) -> None:
    """The shard that another process stores next is none of those that the merge has copied."""
    kept, fresh = world.seal(), world.seal()
    store(world, kept)
    store(world, world.seal(subject="ann"))

    def others() -> None:
        erase(world)
        assert world.rewrite_erased().replaced == 1
        store(world, fresh)

    catalog = HookedCatalog(world.catalog.engine)
    catalog.hook = others
    with pytest.raises(ConflictError, match="replaced or swept"):
        world.merge(10**6, catalog=catalog)
    assert ids(world.stored(include_erased=True)) == ids([kept, fresh])
    assert len(world.files()) == 2


def test_paths_may_hold_spaces_and_more(tmp_path: Path, world: World) -> None:
    world.append(world.seal())
    directory = tmp_path / "my shards #1"
    compactor = Compactor(
        world.log,
        world.catalog,
        LocalStorage(directory),
        clock=world.clock,
        issuer_public=world.keyring.issuer_public,
    )
    (name,) = compactor.run_once().shards
    assert (directory / name).exists()
