"""Merging shards: every living row once, in order, in memory that does not grow with them."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftkeep.errors import StoreError
from draftkeep.ingest.record import SealedTrace
from draftkeep.store import shard
from draftkeep.store.shard import SCHEMA, read_shard
from draftkeep.store.shard_merge import merge_tables
from draftkeep.store.shard_writer import sort_key, write_shard, write_tables
from draftkeep.store.storage_local import LocalStorage
from tests.store.conftest import TARGET, World, ids, rows
from tests.store.test_shard import HEADERS, forge
from tests.store.test_shard_engines import BASE


def write_all(storage: LocalStorage, inputs: list[list[SealedTrace]], tag: str) -> list[str]:
    """Each input as a shard; the names."""
    return [
        write_shard(
            storage, rows(records), bucket_s=2**41, target=TARGET, serial=f"{tag}-{number}"
        ).name
        for number, records in enumerate(inputs)
    ]


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> LocalStorage:
    return LocalStorage(tmp_path_factory.mktemp("shards"))


@settings(max_examples=40)
@given(
    values=st.lists(HEADERS, min_size=1, max_size=16),
    inputs=st.integers(1, 4),
    group_rows=st.integers(1, 5),
    seed=st.integers(0, 2**32),
)
def test_a_merge_is_the_living_rows_in_order_and_each_share_once(
    shards: LocalStorage,
    values: list[dict[str, Any]],
    inputs: int,
    group_rows: int,
    seed: int,
) -> None:
    rng = random.Random(seed)
    records = [forge(row, index, rng) for index, row in enumerate(values)]
    parts: list[list[SealedTrace]] = [[] for _ in range(inputs)]
    for record in records:
        rng.choice(parts).append(record)
    dead = {(item.parsed.trace_id, item.parsed.node) for item in records if rng.random() < 1 / 3}
    tag = rng.randbytes(8).hex()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "ROW_GROUP_ROWS", group_rows)
        names = write_all(shards, [part for part in parts if part], tag)
        tables = merge_tables(shards, names, dead=dead)
        merged = write_tables(shards, tables, bucket_s=2**41, target=TARGET, serial=tag)
    living = sorted(
        (item for item in records if (item.parsed.trace_id, item.parsed.node) not in dead),
        key=lambda item: sort_key(item.parsed),
    )
    if merged is None:
        assert living == []
        return
    assert list(read_shard(shards, merged.name)) == living
    with pq.ParquetFile(shards.path(merged.name)) as opened:
        full, left = divmod(len(living), group_rows)
        sizes = [opened.metadata.row_group(n).num_rows for n in range(opened.num_row_groups)]
        assert sizes == [group_rows] * full + [left] * bool(left)
        table = opened.read(columns=["share_id", "encapsulation"])
    carried = [row["share_id"] for row in table.to_pylist() if row["encapsulation"] is not None]
    assert sorted(carried) == sorted({item.parsed.share_id for item in living})
    shards.remove([*names, merged.name])


MERGE = """
import sys
from pathlib import Path
import pyarrow as pa
from draftkeep.store import shard
from draftkeep.store.shard_merge import merge_tables
from draftkeep.store.shard_writer import write_tables
from draftkeep.store.storage_local import LocalStorage
shard.ROW_GROUP_BYTES = int(sys.argv[1])
storage, names = LocalStorage(Path(sys.argv[2])), sys.argv[3:]
def merge(names, serial):
    tables = merge_tables(storage, names, dead=set())
    return write_tables(storage, tables, bucket_s=1, target=b"T" * 32, serial=serial).rows
def peak_bytes():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024
before = peak_bytes()
print(merge(names, "merged"))
print(pa.default_memory_pool().max_memory())
print(peak_bytes() - before)
"""


def test_the_memory_of_a_merge_is_a_few_row_groups_however_large_its_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    group_bytes, inputs = 2**20, 4
    monkeypatch.setattr(shard, "ROW_GROUP_BYTES", group_bytes)
    rng = random.Random(9)
    storage = LocalStorage(tmp_path)
    peaks = []
    for per_input in (200, 800):
        body = {"ciphertext": rng.randbytes(32 * 1024)}
        parts = [
            [
                forge(BASE | body | {"created_s": rng.randrange(10**6)}, index * inputs + part, rng)
                for index in range(per_input)
            ]
            for part in range(inputs)
        ]
        names = write_all(storage, parts, str(per_input))
        command = [sys.executable, "-c", MERGE, str(group_bytes), str(tmp_path), *names]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        merged, arrow_bytes, grown_bytes = map(int, done.stdout.split())
        assert merged == per_input * inputs
        peaks.append((arrow_bytes, grown_bytes))
    # Of 25 and of 100 MiB, with the bytes that row groups are read from and written to.
    (small_arrow, small_grown), (large_arrow, large_grown) = peaks
    assert large_arrow < 6 * inputs * group_bytes
    assert large_arrow < small_arrow + 4 * group_bytes
    assert large_grown < small_grown + 16 * group_bytes


def test_a_row_without_its_encapsulation_is_said(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    records = [forge(BASE, index, random.Random(index)) for index in range(2)]
    (name,) = write_all(storage, [records], "a")
    table = pq.read_table(storage.path(name))
    hollow = table.set_column(
        SCHEMA.names.index("encapsulation"),
        SCHEMA.field("encapsulation"),
        pa.nulls(table.num_rows, pa.binary()),
    )
    pq.write_table(hollow, storage.path(name))
    with pytest.raises(StoreError, match="without its encapsulation"):
        list(read_shard(storage, name))
    with pytest.raises(StoreError, match="without its encapsulation"):
        list(merge_tables(storage, [name], dead=set()))


def test_many_shards_become_one_in_several_merges(world: World) -> None:
    sealed = [world.seal() for _ in range(20)]
    world.append(*sealed)
    compactor = world.compactor(limit_records=1)
    while compactor.run_once().read:
        pass
    report = world.merge(10**6)
    assert (report.replaced, report.written) == (20, 2)
    assert world.merge(10**6).replaced == 2
    assert len(world.files()) == 1
    assert ids(world.stored()) == ids(sealed)
