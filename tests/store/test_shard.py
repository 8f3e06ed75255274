"""A shard gives back, bit for bit, what was written, and opens by itself."""

import hashlib
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftkeep.errors import StoreError
from draftkeep.ingest.header import Header
from draftkeep.ingest.record import SealedTrace
from draftkeep.store import shard
from draftkeep.store.shard import ShardFile, read_shard
from draftkeep.store.shard_writer import write_shard
from draftkeep.store.storage_local import LocalStorage
from tests.store.conftest import TARGET, World, rows

COUNTS = st.integers(0, 2**63 - 1)
HEADERS = st.fixed_dictionaries(
    {
        "tenant": st.sampled_from(["acme", "birch", "cédre"]),
        "subject_kind": st.integers(0, 1),
        "node": st.sampled_from(["n1", "n2"]),
        "created_s": st.integers(0, 2**40),
        "consent": st.integers(0, 2),
        "policy_version": COUNTS,
        "origin": st.integers(0, 2),
        "parent_trace_id": st.none() | st.binary(min_size=16, max_size=16),
        "domain": st.none() | st.sampled_from(["", "unknown", "law \u2696"]),
        "prompt_tokens": COUNTS,
        "positions": COUNTS,
        "ext": st.binary(max_size=3),
        "share": st.integers(0, 2),
        "ciphertext": st.binary(min_size=16, max_size=40),
    }
)


def forge(values: dict[str, Any], index: int, rng: random.Random) -> SealedTrace:
    """A record of the right shape that nobody sealed."""
    encapsulation = bytes([values["share"]]) * 1168
    fields = {name: value for name, value in values.items() if name not in ("share", "ciphertext")}
    header = Header(
        version=1,
        trace_id=index.to_bytes(16, "big"),
        request_id=rng.randbytes(16),
        period_id=rng.randbytes(16),
        alias=rng.randbytes(16),
        share_id=hashlib.sha256(encapsulation).digest()[:16],
        target=TARGET,
        tokenizer=rng.randbytes(32),
        expiry_s=2**41,
        body_bytes=len(values["ciphertext"]) - 16,
        **fields,
    )
    return SealedTrace(
        header=header.encode(),
        nonce=rng.randbytes(12),
        ciphertext=values["ciphertext"],
        commitment=rng.randbytes(32),
        signature=rng.randbytes(64),
        encapsulation=encapsulation,
    )


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> LocalStorage:
    return LocalStorage(tmp_path_factory.mktemp("shards"))


def path_of(file: ShardFile) -> Path:
    return Path(file.storage.path(file.name))


@given(values=st.lists(HEADERS, min_size=1, max_size=12), seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_record_comes_back_bit_for_bit(
    storage: LocalStorage, values: list[dict[str, Any]], seed: int
) -> None:
    rng = random.Random(seed)
    records = [forge(row, index, rng) for index, row in enumerate(values)]
    file = write_shard(
        storage, rows(records), bucket_s=2**41, target=TARGET, serial=rng.randbytes(8).hex()
    )
    content = path_of(file).read_bytes()
    assert (file.rows, file.size_bytes) == (len(records), len(content))
    assert file.sha256 == hashlib.sha256(content).digest()

    found = list(read_shard(file.storage, file.name))
    assert sorted(found, key=lambda item: item.parsed.trace_id) == records
    keys = [(h.tenant, h.domain or "", h.created_s) for h in (item.parsed for item in found)]
    assert keys == sorted(keys)
    assert list(read_shard(file.storage, file.name, tenants=["acme"])) == [
        item for item in found if item.parsed.tenant == "acme"
    ]

    column = pq.read_table(path_of(file), columns=["encapsulation"]).column(0)
    shares = {item.encapsulation for item in records}
    assert len(column) - column.null_count == len(shares)
    file.remove()


def test_row_groups_of_other_tenants_are_not_needed(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard, "ROW_GROUP_ROWS", 4)
    rng = random.Random(1)
    base: dict[str, Any] = {
        "subject_kind": 0,
        "node": "n1",
        "created_s": 5,
        "consent": 0,
        "policy_version": 1,
        "origin": 0,
        "parent_trace_id": None,
        "domain": None,
        "prompt_tokens": 1,
        "positions": 1,
        "ext": b"",
        "share": 0,
        "ciphertext": b"c" * 20,
    }
    records = [
        forge(base | {"tenant": tenant}, index, rng)
        for index, tenant in enumerate(["acme", "birch", "cedar"] * 8)
    ]
    file = write_shard(storage, rows(records), bucket_s=2**41, target=TARGET, serial="groups")
    with pq.ParquetFile(path_of(file)) as opened:
        assert opened.num_row_groups == 6
        assert shard._row_groups(opened, ["birch"]) == [2, 3]
    found = list(read_shard(file.storage, file.name, tenants=["birch"]))
    assert {item.parsed.tenant for item in found} == {"birch"}
    assert len(found) == 8
    # The encapsulation lies in a row group of another tenant and is still found.
    assert {item.encapsulation for item in found} == {records[0].encapsulation}


def test_a_shard_opens_by_itself(world: World) -> None:
    sealed = [world.seal(f"body {index}".encode()) for index in range(3)]
    file = write_shard(
        world.storage, rows(sealed), bucket_s=sealed[0].parsed.expiry_s, target=TARGET, serial="a"
    )
    opener = world.opener()
    opened = {opener.open(item) for item in read_shard(file.storage, file.name)}
    assert opened == {b"body 0", b"body 1", b"body 2"}


def test_a_file_may_be_unlinked_while_it_is_read(world: World) -> None:
    sealed = [world.seal() for _ in range(3)]
    file = write_shard(
        world.storage, rows(sealed), bucket_s=sealed[0].parsed.expiry_s, target=TARGET, serial="a"
    )
    reading = read_shard(file.storage, file.name)
    first = next(reading)
    file.remove()
    assert len([first, *reading]) == 3


def test_what_is_not_a_shard_is_refused(tmp_path: Path, world: World) -> None:
    sealed = [world.seal()]
    file = write_shard(world.storage, rows(sealed), bucket_s=1, target=TARGET, serial="a")
    short = tmp_path / "short.parquet"
    short.write_bytes(path_of(file).read_bytes()[:-10])
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"a": [1]}), other)
    later = tmp_path / "later.parquet"
    table = pq.read_table(path_of(file))
    pq.write_table(table.replace_schema_metadata({"draftkeep.shard": "2"}), later)
    elsewhere = LocalStorage(tmp_path)
    with pytest.raises(StoreError, match="cut short"):
        list(read_shard(elsewhere, short.name))
    with pytest.raises(StoreError, match="format None, expected 1"):
        list(read_shard(elsewhere, other.name))
    with pytest.raises(StoreError, match="format b'2', expected 1"):
        list(read_shard(elsewhere, later.name))
    with pytest.raises(FileNotFoundError):
        list(read_shard(elsewhere, "none.parquet"))


def test_records_that_do_not_belong_in_one_shard_are_refused(world: World) -> None:
    with pytest.raises(StoreError, match="no records"):
        write_shard(world.storage, [], bucket_s=1, target=TARGET, serial="a")
    with pytest.raises(StoreError, match="group records by target"):
        write_shard(world.storage, rows([world.seal()]), bucket_s=1, target=b"U" * 32, serial="a")
    assert world.files() == set()


def test_a_write_that_fails_leaves_no_file(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(writer: pq.ParquetWriter, *_: object, **__: object) -> None:
        assert world.files()
        raise OSError("disk full")

    monkeypatch.setattr(pq.ParquetWriter, "write_table", fail)
    with pytest.raises(OSError, match="disk full"):
        write_shard(world.storage, rows([world.seal()]), bucket_s=1, target=TARGET, serial="a")
    assert world.files() == set()
