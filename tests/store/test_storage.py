"""What a storage promises, asked of a directory and of a bucket."""

import os
import resource
import time
from pathlib import Path

import pytest

from draftkeep.config import Config, ShardsConfig
from draftkeep.errors import ConfigError, ConflictError, ShardError, StoreError
from draftkeep.store.storage import Storage, open_storage
from draftkeep.store.storage_local import LocalStorage
from draftkeep.store.storage_objects import ObjectStorage
from tests.services.processes import free_port
from tests.services.s3 import Bucket
from tests.store.conftest import log_in

# More than one part of an upload.
LARGE = os.urandom(12 * 1024**2)


def put(storage: Storage, name: str, data: bytes = b"data") -> None:
    with storage.create(name) as stream:
        stream.write(data)


def names(storage: Storage) -> set[str]:
    return {file.name for file in storage.list()}


@pytest.mark.parametrize("data", [b"", b"data", LARGE], ids=["empty", "small", "large"])
def test_a_file_is_there_as_it_was_written(storage: Storage, data: bytes) -> None:
    put(storage, "a.parquet", data)
    assert storage.exists("a.parquet")
    with storage.open("a.parquet") as file:
        assert bytes(file.read()) == data
        file.seek(len(data) // 2)
        assert bytes(file.read(3)) == data[len(data) // 2 :][:3]
        assert file.size() == len(data)
    (listed,) = storage.list()
    assert (listed.name, listed.size_bytes) == ("a.parquet", len(data))
    assert abs(listed.modified_s - time.time()) < 600
    with storage.filesystem.open_input_file(storage.path("a.parquet")) as file:
        assert bytes(file.read()) == data


def test_nothing_is_there_before_it_is_whole(storage: Storage) -> None:
    with storage.create("a.parquet") as stream:
        stream.write(LARGE)
        stream.flush()
        assert not storage.exists("a.parquet")
        assert "a.parquet" not in names(storage)
    assert names(storage) == {"a.parquet"}


@pytest.mark.parametrize("data", [b"half", LARGE], ids=["small", "large"])
def test_an_error_while_writing_leaves_nothing(storage: Storage, data: bytes) -> None:
    def fail() -> None:
        with storage.create("a.parquet") as stream:
            stream.write(data)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert storage.list() == []


def test_what_is_not_there_is_said(storage: Storage) -> None:
    assert storage.list() == []
    assert not storage.exists("a.parquet")
    with pytest.raises(FileNotFoundError), storage.open("a.parquet"):
        pass
    storage.remove(["a.parquet"])


def test_several_are_removed_and_others_stay(storage: Storage) -> None:
    for number in range(4):
        put(storage, f"{number}.parquet")
    storage.remove(f"{number}.parquet" for number in (0, 2, 9))
    assert names(storage) == {"1.parquet", "3.parquet"}
    storage.remove([])
    storage.remove(names(storage))
    assert storage.list() == []


def test_a_mark_is_none_of_the_files(storage: Storage) -> None:
    assert storage.read_mark() is None
    storage.write_mark("one")
    assert storage.read_mark() == "one"
    storage.write_mark("two")
    assert storage.read_mark() == "two"
    assert storage.list() == []
    assert storage.mark_place.startswith(storage.place)
    put(storage, "a.parquet")
    storage.remove(["a.parquet"])
    assert storage.read_mark() == "two"


def test_a_mark_that_is_no_text_is_some_mark(storage: Storage) -> None:
    storage.write_mark("one")
    _, _, path = storage.mark_place.rpartition("s3://")
    with storage.filesystem.open_output_stream(path) as stream:
        stream.write(b"\xff\xfe\x00")
    assert storage.read_mark() not in (None, "")


def test_a_mark_goes_where_its_files_go(tmp_path: Path) -> None:
    """A disk that is not mounted has left a directory without one."""
    storage = LocalStorage(tmp_path / "shards")
    put(storage, "a.parquet")
    storage.write_mark("one")
    assert names(storage) == {"a.parquet"}
    (tmp_path / "shards").rename(tmp_path / "away")
    assert storage.read_mark() is None
    assert LocalStorage(tmp_path / "away").read_mark() == "one"


def test_a_file_swept_while_it_is_written_is_a_conflict(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "shards")

    def write() -> None:
        with storage.create("a.parquet") as stream:
            stream.write(b"data")
            storage.remove(names(storage))

    with pytest.raises(ConflictError, match=r"a\.parquet was swept while it was written"):
        write()
    assert storage.list() == []


def test_what_lies_deeper_is_not_listed(storage: Storage) -> None:
    put(storage, "a.parquet")
    deeper = storage.path("deeper")
    storage.filesystem.create_dir(deeper)
    with storage.filesystem.open_output_stream(f"{deeper}/b.parquet") as stream:
        stream.write(b"other")
    assert names(storage) == {"a.parquet"}


def test_a_file_of_a_directory_is_read_on_after_its_removal(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    put(storage, "a.parquet", LARGE)
    with storage.open("a.parquet") as file:
        file.read(10)
        storage.remove(["a.parquet"])
        assert bytes(file.read()) == LARGE[10:]


def test_a_disk_without_room_is_said_and_serves_again_later(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "shards")
    put(storage, "small.parquet")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(StoreError, match=r"File too large.*has room") as raised:
            put(storage, "large.parquet", LARGE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert not isinstance(raised.value, ShardError)
    assert names(storage) == {"small.parquet"}
    put(storage, "large.parquet", LARGE)
    assert names(storage) == {"small.parquet", "large.parquet"}


def test_whatever_a_directory_refuses_is_said(tmp_path: Path) -> None:
    """It is a file, so nothing can be done in it."""
    (tmp_path / "shards").write_bytes(b"")
    storage = LocalStorage(tmp_path / "shards")
    with pytest.raises(StoreError, match=r"what was asked for a\.parquet"):
        put(storage, "a.parquet")
    with pytest.raises(StoreError, match="Not a directory"):
        storage.list()
    with pytest.raises(StoreError, match="Not a directory"):
        storage.remove(["a.parquet"])


def test_a_file_that_cannot_be_read_is_that_shards_fault(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    (tmp_path / "a.parquet").symlink_to("a.parquet")
    with pytest.raises(ShardError, match="symbolic links"), storage.open("a.parquet"):
        pass


def test_an_object_removed_while_it_is_read_is_not_found(object_storage: ObjectStorage) -> None:
    put(object_storage, "a.parquet", LARGE)

    def read_what_goes() -> None:
        with object_storage.open("a.parquet") as file:
            assert bytes(file.read(10)) == LARGE[:10]
            object_storage.remove(["a.parquet"])
            file.read()

    with pytest.raises(FileNotFoundError, match="not in s3://bucket"):
        read_what_goes()


def test_a_bucket_that_is_not_there_is_said(
    s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(s3_bucket, monkeypatch)
    storage = ObjectStorage("s3://mistyped/x", endpoint=s3_bucket.endpoint, region="us-east-1")
    with pytest.raises(StoreError, match="s3://mistyped/x did not do what was asked"):
        put(storage, "a.parquet")


def test_a_store_that_does_not_answer_is_said_without_credentials(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDSECRET")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "SECRETSECRET")
    endpoint = f"http://127.0.0.1:{free_port()}"
    storage = ObjectStorage("s3://bucket", endpoint=endpoint, region="us-east-1")
    with pytest.raises(StoreError, match="NETWORK_CONNECTION") as raised:
        storage.exists("a.parquet")
    assert "SECRET" not in str(raised.value)


def test_a_configuration_says_where_shards_lie(
    tmp_path: Path, s3_bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    log_in(s3_bucket, monkeypatch)
    local = open_storage(Config(state_dir=tmp_path))
    assert local.place == str(tmp_path / "shards")
    for prefix in ("", "/", "/a/b", "/a/b/"):
        shards = ShardsConfig(
            url=f"s3://{s3_bucket.name}{prefix}", endpoint=s3_bucket.endpoint, region="us-east-1"
        )
        storage = open_storage(Config(state_dir=tmp_path, shards=shards))
        put(storage, "a.parquet")
        assert storage.exists("a.parquet")
        assert storage.place == f"s3://{s3_bucket.name}{prefix}".rstrip("/")
    with pytest.raises(ConfigError, match=r"without shards\.url"):
        open_storage(Config(shards=ShardsConfig(region="us-east-1")))
