"""PostgreSQL that is away when a process starts: it is waited for, and that is said once."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa

from draftkeep.cli.upkeep import do_upkeep
from draftkeep.config import load_config
from draftkeep.ingest.record import encode_record
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.store import database
from draftkeep.store.anchors import ISSUER, publish_anchor
from draftkeep.store.catalog import Catalog
from draftkeep.store.schema import node_tenants
from tests.serve.station import wait_for
from tests.services.postgres import Postgres, running_postgres
from tests.services.processes import free_port
from tests.store.conftest import World, make_world

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def server() -> Iterator[Postgres]:
    """A server of its own, which a test may stop."""
    with running_postgres() as running:
        yield running


class Process:
    """A command that runs until it is told to end, and what it said."""

    def __init__(self, command: str, *arguments: str, config: Path) -> None:
        self._log = config.with_suffix(f".{command}.log")
        with self._log.open("w") as log:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", "draftkeep", command, *arguments, "--config", str(config)],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            )

    def said(self) -> str:
        return self._log.read_text()

    def until(self, text: str) -> None:
        wait_for(lambda: text in self.said() or self.popen.poll() is not None)
        assert text in self.said()

    def end(self) -> str:
        """What it said; it must end well."""
        self.popen.send_signal(signal.SIGTERM)
        assert self.popen.wait(60) == 0, self.said()
        return self.said()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


def configure(directory: Path, url: str, more: str = "") -> Path:
    path = directory / "config.toml"
    plain = url.replace("+psycopg", "")
    path.write_text(
        f'state_dir = "{directory / "state"}"\n{more}\n[catalog]\nurl = "{plain}"\n',
    )
    return path


def serving(port: int) -> str:
    key = sha256(b"key").hexdigest()
    return (
        f'model = {{target = "tiny", threads = 1}}\nserve = {{port = {port}}}\n'
        f'[[tenants]]\nname = "acme"\napi_key_sha256 = "{key}"\ncapture = "opt_out"\n'
    )


def two_captured(directory: Path, url: str) -> World:
    """A state directory with two traces in its log."""
    world = make_world(directory / "state", url, now_s=time.time())
    publish_anchor(world.root, ISSUER, world.keyring.issuer_public)
    log_path = world.root / "log" / "traces"
    log = SqliteLog(log_path, cap_bytes=2**30, bucket_s=600, clock=time.time)
    log.append([encode_record(world.seal()) for _ in range(2)])
    log.close()
    return world


def test_a_node_waits_for_its_catalog_and_then_captures(server: Postgres, tmp_path: Path) -> None:
    url, port = server.create_database(), free_port()
    server.crash()
    node = Process("serve", config=configure(tmp_path, url, serving(port)))
    try:
        node.until("opening the catalog fails and is tried again: the catalog at postgresql://")
        base = f"http://127.0.0.1:{port}"
        assert httpx.get(f"{base}/healthz", trust_env=False).status_code == 200
        assert httpx.get(f"{base}/readyz", trust_env=False).status_code == 503
        answer = httpx.get(f"{base}/v1/models", trust_env=False)
        assert answer.status_code == 503
        assert "the catalog cannot be reached yet; try again later" in answer.text
        server.start()
        wait_for(lambda: httpx.get(f"{base}/readyz", trust_env=False).status_code == 200)
        catalog = Catalog.connect(url)
        with catalog.read() as connection:
            assert list(connection.scalars(sa.select(node_tenants.c.tenant))) == ["acme"]
        catalog.close()
        said = node.end()
    finally:
        node.kill()
    assert said.count("opening the catalog fails") == 1
    assert "opening the catalog works again, after " in said
    assert "serving without" not in said


def test_a_node_that_waits_ends_when_it_is_told_to(tmp_path: Path) -> None:
    nobody = f"postgresql://draftkeep@127.0.0.1:{free_port()}/none"
    node = Process("serve", config=configure(tmp_path, nobody, serving(free_port())))
    try:
        node.until("opening the catalog fails")
        said = node.end()
    finally:
        node.kill()
    assert "Traceback" not in said


def test_compactors_wait_for_their_catalog_and_say_what_they_have(
    server: Postgres, tmp_path: Path
) -> None:
    url = server.create_database()
    world = two_captured(tmp_path, url)
    server.crash()
    member = Process("compact", "--every", "0.2", config=configure(tmp_path, url))
    try:
        member.until("compacting fails and is tried again: the catalog at postgresql://")
        server.start()
        member.until("stored")
        said = member.end()
    finally:
        member.kill()
        world.close()
    assert said.count("compacting fails") == 1
    assert "compacting works again, after " in said
    assert said.count("has partition 0 of 1") == 1
    lines = [json.loads(line) for line in said.splitlines()]
    (counts,) = [line for line in lines if "stored" in line]
    assert (counts["partitions"], counts["stored"], counts["shards"]) == ("0", 2, 1)
    assert "duplicates" not in counts
    assert counts["time"].endswith("+00:00")


def test_upkeep_gives_up_a_frozen_catalog(server: Postgres, tmp_path: Path) -> None:
    url = server.create_database()
    world = two_captured(tmp_path, url)
    config = load_config(configure(tmp_path, url), {})
    engine = database.make_engine(f"{url}?connect_timeout=2", quiet_s=1)
    catalog = Catalog(engine)
    catalog.reach()
    server.freeze()
    try:
        done = do_upkeep(config, catalog, world.storage, clock=time.time)
    finally:
        server.thaw()
    assert ["cannot be used" in str(failure) for failure in done.failures] == [True]
    assert do_upkeep(config, catalog, world.storage, clock=time.time).failures == []
    catalog.close()
    world.close()


def test_what_is_configured_wrongly_ends_a_compactor_at_once(tmp_path: Path) -> None:
    publish_anchor(tmp_path / "state", ISSUER, b"i" * 32)
    config = configure(tmp_path, "postgresql://draftkeep@127.0.0.1/none")
    with config.open("a") as file:
        file.write(f'password_file = "{tmp_path / "nothing"}"\n')
    member = Process("compact", "--every", "0.2", config=config)
    try:
        assert member.popen.wait(60) == 2
    finally:
        member.kill()
    assert "password_file" in member.said()


def test_a_compactor_without_its_table_says_so_and_goes_on(
    server: Postgres, tmp_path: Path
) -> None:
    url = server.create_database()
    world = two_captured(tmp_path, url)
    member = Process("compact", "--every", "0.2", config=configure(tmp_path, url))
    try:
        member.until("stored")
        with world.catalog.begin() as connection:
            connection.execute(sa.text("ALTER TABLE offsets RENAME TO elsewhere"))
        member.until("refused a statement")
        with world.catalog.begin() as connection:
            connection.execute(sa.text("ALTER TABLE elsewhere RENAME TO offsets"))
        member.until("compacting works again")
        member.end()
    finally:
        member.kill()
        world.close()


def test_shards_of_another_catalog_end_a_compactor(server: Postgres, tmp_path: Path) -> None:
    world = make_world(tmp_path / "state", f"sqlite:///{tmp_path / 'catalog.db'}")
    publish_anchor(world.root, ISSUER, world.keyring.issuer_public)
    world.append(world.seal())
    world.compactor().run_once()
    world.close()
    config = configure(tmp_path, server.create_database())
    member = Process("compact", "--every", "0.2", config=config)
    try:
        assert member.popen.wait(60) == 2
    finally:
        member.kill()
    assert "belong to another catalog" in member.said()
