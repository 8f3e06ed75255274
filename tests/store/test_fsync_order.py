"""What is on disk before what, told by the kernel: strace sees the system calls themselves."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

from tests.services.needs import STRACE
from tests.services.skips import require
from tests.store.conftest import World, make_world

WORK = """
import sys
from pathlib import Path
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.store.catalog import Catalog
from draftkeep.store.compactor import Compactor
from draftkeep.store.rewriter import merge
from draftkeep.store.storage_local import LocalStorage
from draftkeep.store.sweeper import Sweeper
root, issuer, now = Path(sys.argv[1]), bytes.fromhex(sys.argv[2]), float(sys.argv[3])
catalog = Catalog.connect(sys.argv[4])
storage = LocalStorage(root / "shards")
names = iter("abc")
compactor = Compactor(
    SqliteLog.open_reader(root / "log"), catalog, storage, clock=lambda: now,
    issuer_public=issuer, limit_records=1, new_serial=lambda: next(names),
)
compactor.run_once()
compactor.run_once()
serial = lambda: next(names)
assert merge(catalog, storage, target_bytes=1 << 20, now_s=now, new_serial=serial).replaced == 2
assert Sweeper(catalog, storage, clock=lambda: now + 10**7).run_once().shards == 1
"""
CALL = re.compile(r"^\d+ +(\w+)\((.*)\) += (-?\d+)")
SYNC = ("fsync", "fdatasync")


def traced(world: World) -> list[tuple[str, str]]:
    """What happened to shards, their directory and the catalog: (what, to which), in order."""
    output = world.root / "strace.txt"
    calls = "fsync,fdatasync,rename,renameat,renameat2,unlink,unlinkat,pwrite64,mkdir"
    arguments = [str(world.root), world.keyring.issuer_public.hex(), str(world.clock())]
    command = ["strace", "-f", "--seccomp-bpf", "-y", "-s", "400", "-e", f"trace={calls}"]
    command += ["-o", str(output), sys.executable, "-c", WORK, *arguments, world.catalog_url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = []
    for line in output.read_text().splitlines():
        call = CALL.match(line)
        if call is not None and call[3] != "-1" and f"{world.root}/" in line:
            found.append(_event(call[1], call[2], world.root))
    return [event for event in found if event[1].startswith(("shards", "catalog"))]


def _event(name: str, arguments: str, root: Path) -> tuple[str, str]:
    """The call by its kind, and the last path in it, below `root`."""
    path = re.findall(rf'[<"]{re.escape(str(root))}/([^>"]*)[>"]', arguments)[-1]
    kind = "sync" if name in SYNC else re.sub("at2?$", "", name).removesuffix("64")
    return kind, path


def squeezed(events: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The events with the many writes of a commit as one."""
    return [event for event, _ in itertools.groupby(events)]


def test_a_file_is_durable_before_its_commit_and_goes_only_after_it(tmp_path: Path) -> None:
    require([STRACE])
    world = make_world(tmp_path, f"sqlite:///{tmp_path / 'catalog.db'}")
    sealed = [world.seal(), world.seal()]
    world.append(*sealed)
    bucket, target = sealed[0].parsed.expiry_s, sealed[0].parsed.target.hex()[:8]
    try:
        events = squeezed(traced(world))
    finally:
        world.close()
    wal = "catalog.db-wal"

    def written(serial: str) -> list[tuple[str, str]]:
        name = f"{bucket}-{target}-{serial}.parquet"
        return [
            ("sync", f"shards/.tmp-{name}"),
            ("rename", f"shards/{name}"),
            ("sync", "shards"),
            ("pwrite", wal),
            ("sync", wal),
        ]

    def removed(*serials: str) -> list[tuple[str, str]]:
        names = [f"shards/{bucket}-{target}-{serial}.parquet" for serial in serials]
        return [*(("unlink", name) for name in names), ("sync", "shards")]

    start = events.index(written("a")[0])
    assert events[start:] == [
        *written("a"),
        *written("b"),
        *written("c"),
        *removed("a", "b"),
        # The trace ids, and then the shard.
        *[("pwrite", wal), ("sync", wal)] * 2,
        *removed("c"),
    ]
