"""SIGKILL at random moments of server and compactor: what was acknowledged is there, once.

The witness is outside both: the server writes each trace id to a pipe after the log's append has
returned, and this process holds the other end.
"""

import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from draftkeep.config import RetentionConfig
from draftkeep.ingest.codec import decode_body
from draftkeep.ingest.envelope import Opener
from draftkeep.ingest.record import SealedTrace
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.ingest.tables import only_identity
from draftkeep.policies.keyring import Keyring
from draftkeep.policies.signing import SigningKey
from draftkeep.store.catalog import Catalog
from draftkeep.store.compactor import Compactor
from draftkeep.store.nodes import enrol_node, node_public
from draftkeep.store.schema import dead_letters, gaps, shards, trace_ids
from draftkeep.store.shard import read_shard
from draftkeep.store.storage_local import LocalStorage
from draftkeep.store.sweeper import Sweeper
from tests.crash.forking import PATIENCE_S, ForkServer

KILLS = 40
KINDS = ("serve", "compact")


class Witness:
    """Collects acknowledged trace ids from a pipe until every writer is gone."""

    def __init__(self) -> None:
        self._read_fd, self.write_fd = os.pipe()
        self._changed = threading.Condition()
        self._lines: list[bytes] = []
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def _collect(self) -> None:
        with os.fdopen(self._read_fd, "rb") as lines:
            for line in lines:
                with self._changed:
                    self._lines.append(bytes.fromhex(line.decode().rstrip("\n")))
                    self._changed.notify_all()

    def wait_for_more(self, count: int) -> bool:
        """Wait until `count` further traces are acknowledged; False when patience ran out."""
        with self._changed:
            goal = len(self._lines) + count
            return self._changed.wait_for(lambda: len(self._lines) >= goal, PATIENCE_S)

    def close(self) -> list[bytes]:
        """Everything acknowledged, in order; call it when all writers are gone."""
        os.close(self.write_fd)
        self._thread.join(PATIENCE_S)
        return self._lines


class Site:
    """One state directory with its keys, an enrolled node and a published period."""

    def __init__(self, directory: Path) -> None:
        self.state_dir = directory / "state"
        self.keys_dir = directory / "keys"
        self.now_s = int(time.time())
        self.keyring = Keyring.open(self.keys_dir, retention=RetentionConfig(), clock=self.clock)
        signing = SigningKey.load_or_create(self.keys_dir / "node-node-1.key")
        self.catalog = Catalog.open(self.state_dir / "catalog.db")
        enrol_node(self.catalog, "node-1", signing.public, ["acme"], self.now_s)

    def clock(self) -> float:
        return float(self.now_s)

    @property
    def shards_dir(self) -> Path:
        return self.state_dir / "shards"

    @property
    def storage(self) -> LocalStorage:
        return LocalStorage(self.shards_dir)

    def recover(self) -> int:
        """Open the log as a restarted node does, empty it into shards, sweep; the orphans found."""
        log = SqliteLog(self.state_dir / "log", cap_bytes=2**28, bucket_s=1, clock=time.time)
        compactor = Compactor(
            log,
            self.catalog,
            self.storage,
            clock=self.clock,
            issuer_public=self.keyring.issuer_public,
        )
        while compactor.run_once().read:
            pass
        first, following = log.bounds()
        assert first == following
        log.close()
        later = time.time() + 1
        return (
            Sweeper(self.catalog, self.storage, clock=lambda: later, grace_s=0).run_once().orphans
        )

    def stored(self) -> list[SealedTrace]:
        """Every row of every file in the shards directory, listed or not."""
        names = sorted(file.name for file in self.storage.list())
        return [sealed for name in names for sealed in read_shard(self.storage, name)]

    def rows(self, table: Any) -> list[Any]:
        with self.catalog.read() as connection:
            return list(connection.execute(table.select()))

    def opener(self) -> Opener:
        return Opener(
            self.keyring.job_keys(),
            lambda name: node_public(self.catalog, name),
            clock=self.clock,
        )

    def close(self) -> None:
        self.catalog.close()
        self.keyring.close()


def fork_server(site: Site, witness: Witness, errors: Path) -> ForkServer:
    """The process whose children are killed; see fork_server.py."""
    job = {
        "state_dir": str(site.state_dir),
        "keys_dir": str(site.keys_dir),
        "issuer_public": site.keyring.issuer_public.hex(),
        "now_s": site.now_s,
        "witness_fd": witness.write_fd,
    }
    return ForkServer("tests.crash.fork_server", job, errors=errors, pass_fds=[witness.write_fd])


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    site = Site(tmp_path)
    yield site
    site.close()


def kill_at_random(
    server: ForkServer, witness: Witness, draw: random.Random, stored: Callable[[], int]
) -> tuple[Counter[str], int]:
    """Keep one server and one compactor running and kill either, over and over.

    The kills by kind, and the most that `stored` said at any of them.
    """
    running = {kind: server.start(kind) for kind in KINDS}
    killed: Counter[str] = Counter()
    most = 0
    for number in range(KILLS):
        kind = KINDS[number % 2]
        if kind == "serve":
            # By progress, so that a slow machine gets as far, then by time.
            assert witness.wait_for_more(draw.choice([0, 1, 5, 20]))
        time.sleep(draw.random() * draw.choice([0.01, 0.3]))
        assert server.kill(running[kind])["signal"] == signal.SIGKILL, kind
        killed[kind] += 1
        most = max(most, stored())
        running[kind] = server.start(kind)
    for kind, pid in running.items():
        assert server.kill(pid)["signal"] == signal.SIGKILL, kind
        killed[kind] += 1
    return killed, most


def test_no_acknowledged_trace_is_lost_or_doubled(site: Site, tmp_path: Path) -> None:
    witness = Witness()
    errors = tmp_path / "stderr.txt"
    server = fork_server(site, witness, errors)
    try:
        killed, most_stored = kill_at_random(
            server, witness, random.Random(2026), lambda: len(site.rows(shards))
        )
    finally:
        server.close()
        acknowledged = witness.close()
        print(errors.read_text())
    assert sum(killed.values()) >= 30
    assert len(acknowledged) > KILLS
    assert most_stored > 0, "no compactor stored anything before the recovery"

    orphans = site.recover()
    stored = site.stored()
    ids = Counter(sealed.parsed.trace_id for sealed in stored)
    print(f"{len(acknowledged)} acknowledged, {len(ids)} stored, {orphans} orphans swept")
    assert set(acknowledged) <= set(ids)
    assert max(ids.values()) == 1
    assert max(Counter(acknowledged).values()) == 1

    listed = {row.name for row in site.rows(shards)}
    assert listed == {file.name for file in site.storage.list()}
    assert {row.trace_id for row in site.rows(trace_ids)} == set(ids)
    assert site.rows(dead_letters) == []
    assert site.rows(gaps) == []

    opener = site.opener()
    for sealed in stored:
        trace = decode_body(opener.open(sealed), only_identity)
        assert trace.positions == sealed.parsed.positions > 0
