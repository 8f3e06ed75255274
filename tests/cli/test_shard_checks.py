"""`draftkeep doctor` on shards, and what it and `audit` leave as they found it."""

import re
import sqlite3
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from typer.testing import CliRunner

from draftkeep.cli.auditing import ask
from draftkeep.cli.commands import app
from draftkeep.cli.doctor.finding import Finding
from draftkeep.cli.doctor.run import examine
from draftkeep.config import Config, ShardsConfig, load_config
from draftkeep.errors import ConfigError, StoreError
from draftkeep.store import database, migrations
from draftkeep.store.storage import open_storage
from tests.services.s3 import Bucket
from tests.store.conftest import World, log_in, make_world


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = make_world(tmp_path, f"sqlite:///{tmp_path / 'catalog.db'}")
    yield made
    made.close()


@pytest.fixture
def config(world: World) -> Config:
    """Of a world with one shard."""
    path = world.root / "config.toml"
    path.write_text(f'state_dir = "{world.root}"\n[model]\ntarget = "none"\n')
    world.append(world.seal())
    assert world.compactor().run_once().stored == 1
    return load_config(path, {})


def shards_finding(config: Config) -> Finding:
    return next(item for item in examine(config) if item.check == "shards")


def in_bucket(config: Config, bucket: Bucket, name: str) -> Config:
    shards = ShardsConfig(url=f"s3://{name}/shards", endpoint=bucket.endpoint, region="us-east-1")
    return config.model_copy(update={"shards": shards})


def test_a_good_place(config: Config) -> None:
    found = shards_finding(config)
    assert (found.status, found.remedy) == ("ok", "")
    assert found.detail.startswith("1 files in ")


def test_another_catalogs_place(config: Config) -> None:
    open_storage(config).write_mark("00")
    found = shards_finding(config)
    assert (found.status, "belong to another catalog" in found.detail) == ("fail", True)


def test_a_place_without_the_listed_files(config: Config, world: World) -> None:
    (name,) = world.files()
    (world.shards_dir / name).unlink()
    found = shards_finding(config)
    assert found.status == "fail"
    assert name in found.detail
    assert "shards.url" in found.remedy
    with pytest.raises(StoreError, match=rf"{name} the first, are not in .* check that shards.url"):
        ask(config, "SELECT count(*) FROM traces")


def test_an_unreadable_shard_is_the_storages_error(config: Config, world: World) -> None:
    (name,) = world.files()
    (world.shards_dir / name).write_bytes(b"junk" * 10)
    with pytest.raises(StoreError, match=r"cannot be read .*magic bytes"):
        ask(config, "SELECT count(*) FROM traces")


def test_a_bucket(config: Config, s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    log_in(s3_bucket, monkeypatch)
    found = shards_finding(in_bucket(config, s3_bucket, "nobody-made-it"))
    assert (found.status, found.remedy) == ("fail", "make the bucket")
    other = in_bucket(config, s3_bucket, s3_bucket.name)
    found = shards_finding(other)
    assert (found.status, "is listed and not in s3://" in found.detail) == ("fail", True)
    assert open_storage(other).list() == []
    assert open_storage(other).read_mark() is None


class _Refusing(BaseHTTPRequestHandler):
    """A store that lets nobody in."""

    def do_GET(self) -> None:
        body = b"<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
        self.send_response(403)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing on stderr."""


@pytest.mark.parametrize("refusing", [True, False])
def test_a_store_that_refuses_and_one_that_is_away(
    config: Config, monkeypatch: pytest.MonkeyPatch, refusing: bool
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "nobody")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "zebra-canary-77")
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as server:
        endpoint = f"http://127.0.0.1:{server.server_port}"
        Thread(target=server.serve_forever, daemon=True).start()
        if not refusing:
            server.shutdown()
            server.server_close()
        shards = ShardsConfig(url="s3://some/shards", endpoint=endpoint, region="us-east-1")
        found = shards_finding(config.model_copy(update={"shards": shards}))
        if refusing:
            server.shutdown()
    assert found.status == "fail"
    assert ("ACCESS_DENIED" if refusing else "NETWORK_CONNECTION") in found.detail
    assert "shards.endpoint" in found.remedy
    assert "credentials" in found.remedy
    assert "zebra" not in found.detail + found.remedy


def test_looking_makes_no_table(config: Config, tmp_path: Path) -> None:
    empty = tmp_path / "other"
    empty.mkdir()
    (empty / "catalog.db").touch()
    mistyped = config.model_copy(update={"state_dir": empty})
    found = {item.check: item for item in examine(mistyped)}
    assert found["catalog"].status == "ok"
    assert found["catalog"].detail.startswith(f"no catalog at {empty / 'catalog.db'} yet")
    assert found["drafter"].status == "warn"
    with sqlite3.connect(empty / "catalog.db") as raw:
        assert raw.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
    raw.close()
    with pytest.raises(ConfigError, match="no catalog"):
        ask(mistyped, "SELECT 1")


def test_looking_migrates_nothing(config: Config, tmp_path: Path) -> None:
    older = tmp_path / "older"
    older.mkdir()
    engine = database.make_engine(f"sqlite:///{older / 'catalog.db'}")
    with database.migrating(engine) as connection:
        version = migrations.upgrade(connection, dict(list(migrations.known().items())[:-1]))
    settings = config.model_copy(update={"state_dir": older})
    found = {item.check: item for item in examine(settings)}
    assert (found["catalog"].status, found["shards"].status) == ("fail", "warn")
    assert "copy the catalog" in found["catalog"].remedy
    with pytest.raises(StoreError, match="copy the catalog"):
        ask(settings, "SELECT 1")
    with engine.connect() as connection:
        assert migrations.version_of(connection) == version
    engine.dispose()


def test_each_finding_is_a_line_and_a_report_has_times_for_people(
    config: Config, world: World
) -> None:
    runner = CliRunner()
    path = str(world.root / "config.toml")
    shown = runner.invoke(app, ["doctor", "--config", path])
    assert shown.exit_code == 1
    starts = [line.split()[0] for line in shown.output.splitlines() if line[0] != " "]
    assert starts == [item.check for item in examine(config)]
    assert "remedy: " in shown.output
    report = runner.invoke(app, ["audit", "--report", "inventory", "--config", path]).output
    assert "2096-10-02 07:01:00Z" in report
    raw = runner.invoke(app, ["audit", "--report", "inventory", "--json", "--config", path]).output
    assert f'"oldest_s": {int(world.clock())}' in raw


def test_the_target_is_loaded_once(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftkeep.store.models import target

    loads = []
    load = target.load_target

    def counted(name: str, **options: str) -> target.TargetModel:
        loads.append(name)
        return load(name, device=options["device"], dtype=options["dtype"])

    monkeypatch.setattr(target, "load_target", counted)
    monkeypatch.setenv("DRAFTKEEP_CACHE", str(tmp_path / "cache"))
    tiny = config.model_copy(update={"model": config.model.model_copy(update={"target": "tiny"})})
    found = {item.check: item.status for item in examine(tiny)}
    assert (found["model"], found["drafter"], loads) == ("ok", "warn", ["tiny"])


def test_the_guides_examples_are_configurations(tmp_path: Path) -> None:
    guide = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text(encoding="utf-8")
    examples = re.findall(r"```toml\n(.*?)```", guide, re.DOTALL)
    assert sum("[kafka]" in text and "127.0.0.1" in text for text in examples) == 1
    for text in examples:
        path = tmp_path / "example.toml"
        path.write_text(text, encoding="utf-8")
        load_config(path, {})
