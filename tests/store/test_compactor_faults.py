"""Whatever crashes between which steps: every good trace is stored exactly once.

A crash is an exception that nothing in the package catches, raised at one of the points where a
process could die: around each log call, each file write and each catalog transaction.
"""

import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test
from sqlalchemy.engine import Connection

from draftkeep.errors import ConflictError
from draftkeep.ingest.log import LogRecord
from draftkeep.ingest.record import SealedTrace, encode_record
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.store import compactor as compactor_module
from draftkeep.store import rewriter, schema
from draftkeep.store.catalog import Catalog
from draftkeep.store.check import check_catalog
from draftkeep.store.compactor import Compactor
from draftkeep.store.erasure import erase_subject
from draftkeep.store.shard import read_shard
from draftkeep.store.shard_writer import write_shard, write_tables
from draftkeep.store.sweeper import Sweeper
from tests.deployment import PERIOD_S, TTL_S
from tests.store.conftest import World, ids, make_world, resign


class Crash(BaseException):
    """The process died here."""


class Fuse:
    """Counts points passed and crashes at the chosen one; 0 never does."""

    def __init__(self) -> None:
        self.left = 0
        self.passed = 0

    def __call__(self) -> None:
        self.passed += 1
        self.left -= 1
        if self.left == 0:
            raise Crash


class FusedCatalog(Catalog):
    """Can die before a write transaction begins, before it commits, and after it committed."""

    fuse: Fuse

    @contextmanager
    def begin(self, *, shared: bool = False) -> Iterator[Connection]:
        self.fuse()
        with super().begin(shared=shared) as connection:
            yield connection
            self.fuse()
        self.fuse()


class FusedLog:
    """Can die around every call a compactor makes."""

    def __init__(self, log: SqliteLog, fuse: Fuse) -> None:
        self._log, self._fuse, self.name = log, fuse, log.name
        self.append, self.close, self.size_bytes = log.append, log.close, log.size_bytes
        self.identity, self.bounds = log.identity, log.bounds

    def read(self, start: int, limit_records: int, limit_bytes: int) -> list[LogRecord]:
        self._fuse()
        return self._log.read(start, limit_records, limit_bytes)

    def free(self, up_to: int) -> None:
        self._fuse()
        self._log.free(up_to)
        self._fuse()


class StoreMachine(RuleBasedStateMachine):
    """Producers, a compactor that keeps dying, erasures, merges, sweeps, and the clock."""

    new_catalog_url: Callable[[], str]

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.world = make_world(self.root, self.new_catalog_url())
        self.fuse = Fuse()
        self.catalog = FusedCatalog(self.world.catalog.engine)
        self.catalog.fuse = self.fuse
        self.good: list[SealedTrace] = []
        self.erased: set[bytes] = set()

        def fused(write: Callable[..., Any]) -> Callable[..., Any]:
            def fused_write(*arguments: Any, **named: Any) -> Any:
                self.fuse()
                file = write(*arguments, **named)
                self.fuse()
                return file

            return fused_write

        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(compactor_module, "write_shard", fused(write_shard))
        self.patch.setattr(rewriter, "write_tables", fused(write_tables))

    def teardown(self) -> None:
        try:
            self.check_everything_after_recovery()
        finally:
            self.patch.undo()
            self.world.close()
            shutil.rmtree(self.root)

    def compactor(self) -> Compactor:
        return self.world.compactor(
            log=FusedLog(self.world.log, self.fuse), catalog=self.catalog, limit_records=3
        )

    def crashing_at(self, point: int, action: Callable[[], object]) -> None:
        self.fuse.left = point
        with suppress(Crash):
            action()
        self.fuse.left = 0

    @rule(subjects=st.lists(st.sampled_from([None, "ann", "bob"]), min_size=1, max_size=4))
    def produce(self, subjects: list[str | None]) -> None:
        sealed = [self.world.seal(subject=subject) for subject in subjects]
        self.good += sealed
        self.world.append(*sealed)

    @rule(data=st.data(), again=st.integers(1, 3))
    def resend(self, data: st.DataObject, again: int) -> None:
        if self.good:
            sealed = data.draw(st.sampled_from(self.good))
            self.world.append(*[sealed] * again)

    @rule(content=st.binary(max_size=20))
    def send_poison(self, content: bytes) -> None:
        self.world.log.append([b"\xff" + content])

    @rule(data=st.data())
    def send_other_bytes_under_a_known_id(self, data: st.DataObject) -> None:
        if not self.good:
            return
        sealed = data.draw(st.sampled_from(self.good))
        forged = resign(self.world, replace(sealed, nonce=b"n" * 12))
        # After its original in the log: whichever comes first is the trace.
        self.world.log.append([encode_record(forged)])

    @rule(point=st.integers(0, 14))
    def compact(self, point: int) -> None:
        self.crashing_at(point, lambda: self.compactor().run_once())

    @rule(point=st.integers(0, 10))
    def merge(self, point: int) -> None:
        self.crashing_at(point, lambda: self.world.merge(10**6, catalog=self.catalog))

    @rule(point=st.integers(0, 10))
    def rewrite(self, point: int) -> None:
        self.crashing_at(point, lambda: self.world.rewrite_erased(catalog=self.catalog))

    @rule(point=st.integers(0, 8))
    def sweep(self, point: int) -> None:
        self.crashing_at(point, lambda: self.sweeper().run_once())

    @rule(subject=st.sampled_from(["ann", "bob"]), point=st.integers(0, 6))
    def erase(self, subject: str, point: int) -> None:
        aliases = {alias for _, alias in self.world.keyring.aliases_of("acme", subject)}
        self.crashing_at(point, lambda: self._erase(subject))
        self._erase(subject)
        self.erased |= aliases

    def _erase(self, subject: str) -> None:
        erase_subject(
            self.catalog,
            self.world.keyring,
            tenant="acme",
            subject=subject,
            now_s=self.world.clock(),
        )

    @rule(periods=st.sampled_from([1, 1, 1, TTL_S // PERIOD_S]))
    def wait(self, periods: int) -> None:
        self.world.clock.now_s += periods * PERIOD_S

    @invariant()
    def readers_see_no_trace_twice_and_none_that_must_be_gone(self) -> None:
        found = self.world.stored()
        assert len(set(ids(found))) == len(found)
        assert set(ids(found)) <= {item.parsed.trace_id for item in self.live()}

    def live(self) -> list[SealedTrace]:
        now_s = self.world.clock()
        return [
            item
            for item in self.good
            if item.parsed.expiry_s > now_s and item.parsed.alias not in self.erased
        ]

    def sweeper(self) -> Sweeper:
        # The hand clock runs ahead of the files' dates, so every orphan is old enough.
        return Sweeper(self.catalog, self.world.storage, clock=self.world.clock)

    def check_everything_after_recovery(self) -> None:
        while self.compactor().run_once().read:
            pass
        assert ids(self.world.stored()) == ids(self.live())
        self.world.rewrite_erased(catalog=self.catalog)
        self.world.merge(10**6, catalog=self.catalog)
        assert self.sweeper().run_once().missing == ()
        assert ids(self.world.stored()) == ids(self.live())
        assert ids(self.world.stored(include_erased=True)) == ids(self.live())
        assert_catalog_is_the_files(self.world)
        world = self.world
        findings = check_catalog(
            world.catalog, world.storage, logs=[world.log], now_s=world.clock()
        )
        assert [finding for finding in findings if finding.broken] == []


def assert_catalog_is_the_files(world: World) -> None:
    """Files, shard rows and trace ids say the same."""
    with world.catalog.read() as connection:
        rows = {row.id: row for row in connection.execute(sa.select(schema.shards))}
        known = connection.execute(
            sa.select(schema.trace_ids).where(schema.trace_ids.c.shard.is_not(None))
        ).all()
    assert world.files() == {row.name for row in rows.values()}
    for shard_id, row in rows.items():
        headers = [sealed.parsed for sealed in read_shard(world.storage, row.name)]
        assert row.rows == len(headers)
        assert {header.expiry_s for header in headers} == {row.bucket_s}
        assert sorted((header.trace_id, header.node) for header in headers) == sorted(
            (item.trace_id, item.node) for item in known if item.shard == shard_id
        )
    assert {item.shard for item in known} == set(rows)


def test_exactly_once_whatever_crashes_where(new_catalog_url: Callable[[], str]) -> None:
    class Machine(StoreMachine):
        pass

    Machine.new_catalog_url = staticmethod(new_catalog_url)
    run_state_machine_as_test(
        Machine,
        settings=settings(max_examples=12, stateful_step_count=25, deadline=None),
    )


def test_a_crash_at_every_single_point_of_a_run(world: World) -> None:
    fuse = Fuse()
    catalog = FusedCatalog(world.catalog.engine)
    catalog.fuse = fuse
    log = FusedLog(world.log, fuse)
    sealed: list[SealedTrace] = []

    def batch() -> None:
        fresh = [world.seal(), world.seal(tenant="birch"), world.seal(target=b"U" * 32)]
        world.append(*fresh, fresh[0])
        world.log.append([b"poison"])
        sealed.extend(fresh)

    # The first run has more to do: it makes the place the catalog's.
    world.compactor().run_once()
    batch()
    world.compactor(log=log, catalog=catalog).run_once()
    points = fuse.passed
    assert points >= 6
    for point in range(1, points + 1):
        batch()
        fuse.left = point
        with pytest.raises(Crash):
            world.compactor(log=log, catalog=catalog).run_once()
        fuse.left = 0
        report = world.compactor(log=log, catalog=catalog).run_once()
        assert report.stored in (0, 3)
        assert ids(world.stored()) == ids(sealed)
    Sweeper(world.catalog, world.storage, clock=world.clock).run_once()
    assert_catalog_is_the_files(world)


LOOP = """
import sys
from pathlib import Path
from draftkeep.errors import ConflictError
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.store.catalog import Catalog
from draftkeep.store.check import check_catalog
from draftkeep.store.compactor import Compactor
from draftkeep.store.rewriter import merge, random_serial
from draftkeep.store.storage_local import LocalStorage
root, issuer, now = Path(sys.argv[1]), bytes.fromhex(sys.argv[2]), float(sys.argv[3])
catalog = Catalog.connect(sys.argv[4])
storage = LocalStorage(root / "shards")
compactor = Compactor(
    SqliteLog.open_reader(root / "log"), catalog, storage,
    clock=lambda: now, issuer_public=issuer, limit_records=4,
)
print("ready", flush=True)
while True:
    try:
        compactor.run_once()
        merge(catalog, storage, target_bytes=1 << 20, now_s=now, new_serial=random_serial)
    except ConflictError:
        pass
"""


def test_two_compactors_that_are_killed_again_and_again_lose_and_repeat_nothing(
    world: World,
) -> None:
    rng = random.Random(3)
    arguments = [str(world.root), world.keyring.issuer_public.hex(), str(world.clock())]
    arguments.append(world.catalog_url)
    command = [sys.executable, "-c", LOOP, *arguments]
    sealed: list[SealedTrace] = []
    running: list[subprocess.Popen[str]] = []
    try:
        for _ in range(3):
            running = [
                subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)
            ]
            for process in running:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            for _ in range(8):
                fresh = [world.seal() for _ in range(3)]
                sealed += fresh
                world.append(*fresh, rng.choice(sealed))
                time.sleep(rng.random() * 0.05)
            kill(running)
    finally:
        kill(running)
    while drain_once(world):
        pass
    assert ids(world.stored()) == ids(sealed)
    assert Sweeper(world.catalog, world.storage, clock=world.clock).run_once().missing == ()
    assert_catalog_is_the_files(world)
    assert {world.opener().open(item) for item in world.stored()} == {b"body"}


def drain_once(world: World) -> bool:
    """Whether there may be more: the database may still commit for one that was killed."""
    try:
        return world.compactor().run_once().read > 0
    except ConflictError:
        return True


def kill(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def test_a_failing_disk_stops_the_run_and_loses_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed = [world.seal()]
    world.append(*sealed)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(compactor_module, "write_shard", full)
        with pytest.raises(OSError, match="No space left"):
            world.compactor().run_once()
    assert world.log.bounds() == (0, 1)
    assert world.compactor().run_once().stored == 1
    assert world.stored() == sealed
