"""`draftkeep catalog`: what its commands show, and their exit status."""

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftkeep.cli.commands import app
from draftkeep.errors import ConfigError, InputError, StoreError
from draftkeep.ingest.log import PartitionId
from draftkeep.store.catalog import Catalog
from draftkeep.store.offsets import LogOffset, advance, stored_offsets
from draftkeep.store.storage_objects import ObjectStorage
from tests.services.s3 import Bucket
from tests.store.conftest import log_in


def check(state_dir: Path, *options: str) -> tuple[int, str]:
    return run(state_dir, "check", *options)


def run(state_dir: Path, *arguments: str) -> tuple[int, str]:
    runner = CliRunner(env={"DRAFTKEEP_STATE_DIR": str(state_dir)})
    result = runner.invoke(app, ["catalog", *arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_of_logs_with_one_name_the_one_whose_id_is_given_is_forgotten(tmp_path: Path) -> None:
    catalog = Catalog.open(tmp_path / "catalog.db")
    with catalog.begin() as connection:
        for number, name in enumerate(["traces", "traces", ""]):
            offset = LogOffset(
                identity=PartitionId(f"cluster{number}", f"topic{number}", 0),
                stored=None,
                first=0,
                following=5,
                topic_name=name,
            )
            advance(connection, offset, 5, 0.0, [])
    status, output = run(tmp_path, "forget-log", "traces")
    assert status == 1
    assert all(word in output for word in ("cluster0", "topic0", "cluster1", "topic1"))
    with pytest.raises(InputError, match="2 logs are named traces: topic0, topic1"):
        run(tmp_path, "forget-log", "traces", "--yes")
    assert [found.topic_id for found in stored_offsets(catalog, "traces")] == ["topic0", "topic1"]
    # One of an earlier version, whose name nobody knows, too.
    for topic_id in ("topic1", "topic2"):
        assert run(tmp_path, "forget-log", topic_id, "--yes")[0] == 0
        assert stored_offsets(catalog, topic_id) == []
    assert run(tmp_path, "forget-log", "traces", "--yes")[0] == 0
    catalog.close()


def test_without_a_catalog_it_refuses_and_makes_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no catalog in"):
        check(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_sound_store_is_one_ok_a_rule_and_status_0(tmp_path: Path) -> None:
    Catalog.open(tmp_path / "catalog.db").close()
    status, output = check(tmp_path)
    assert status == 0
    assert output.count(" ok ") > 20
    assert "broken" not in output.replace("broken ┃", "")


def test_damage_is_status_1_until_it_is_repaired(tmp_path: Path) -> None:
    Catalog.open(tmp_path / "catalog.db").close()
    orphan = tmp_path / "shards" / ".tmp-1-54545454-lost.parquet"
    orphan.parent.mkdir()
    orphan.write_bytes(b"half a shard")
    os.utime(orphan, (0, 0))
    status, output = check(tmp_path, "--sizes-only")
    assert status == 1
    assert ".tmp-1-54545454-lost.parquet" in output
    assert orphan.exists()
    status, output = check(tmp_path, "--repair")
    assert status == 0
    assert "repaired" in output
    assert not orphan.exists()
    assert check(tmp_path)[0] == 0


def test_shards_in_a_bucket_are_checked_there(
    tmp_path: Path, s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(s3_bucket, monkeypatch)
    url = f"s3://{s3_bucket.name}/shards"
    monkeypatch.setenv("DRAFTKEEP_SHARDS__URL", url)
    monkeypatch.setenv("DRAFTKEEP_SHARDS__ENDPOINT", s3_bucket.endpoint)
    monkeypatch.setenv("DRAFTKEEP_SHARDS__REGION", "us-east-1")
    Catalog.open(tmp_path / "catalog.db").close()
    assert check(tmp_path)[0] == 0
    ObjectStorage(url, endpoint=s3_bucket.endpoint, region="us-east-1").write_mark("another")
    with pytest.raises(StoreError, match=f"the shards in {url} belong to another catalog"):
        check(tmp_path)
