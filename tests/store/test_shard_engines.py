"""Any engine reads a shard to the same values, and reads no more of it than a question needs."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from draftkeep.ingest.header import FIELD_NAMES
from draftkeep.ingest.record import SealedTrace
from draftkeep.store.shard import SCHEMA
from draftkeep.store.shard_writer import sort_key, write_shard
from draftkeep.store.storage_local import LocalStorage
from tests.store.conftest import TARGET, rows
from tests.store.test_shard import forge

BASE: dict[str, Any] = {
    "tenant": "acme",
    "subject_kind": 0,
    "node": "n1",
    "created_s": 100,
    "consent": 0,
    "policy_version": 1,
    "origin": 0,
    "parent_trace_id": None,
    "domain": "law",
    "prompt_tokens": 1,
    "positions": 1,
    "ext": b"",
    "share": 0,
    "ciphertext": b"c" * 40,
}
ODD: list[dict[str, Any]] = [
    {"domain": None},
    {"domain": ""},
    {"domain": "law \u2696\U0001f9fe"},
    {"tenant": "cédre"},
    {"tenant": "\U0001f9fe", "node": "n\u00f8de"},
    {"parent_trace_id": bytes(16)},
    {"parent_trace_id": b"\xff" * 16, "origin": 1},
    {"ext": b"\x00\xff"},
    {"policy_version": 2**63 - 1, "positions": 0, "prompt_tokens": 2**63 - 1},
    {"ciphertext": bytes(range(256)) * 3400, "share": 1},
    {"ciphertext": b"t" * 16, "subject_kind": 1, "consent": 2},
]


def write(directory: Path, changes: list[dict[str, Any]]) -> tuple[Path, list[SealedTrace]]:
    """A shard of forged records, and those records in its order."""
    rng = random.Random(4)
    records = [forge(BASE | change, index, rng) for index, change in enumerate(changes)]
    rng.shuffle(records)
    storage = LocalStorage(directory)
    file = write_shard(storage, rows(records), bucket_s=2**41, target=TARGET, serial="s")
    ordered = sorted(records, key=lambda item: sort_key(item.parsed))
    return Path(storage.path(file.name)), ordered


def by_arrow(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = ds.dataset(path).to_table().to_pylist()
    return found


def by_duckdb(path: Path) -> list[dict[str, Any]]:
    with duckdb.connect(":memory:") as connection:
        answer = connection.execute("SELECT * FROM read_parquet($1)", [str(path)])
        names = [column[0] for column in answer.description or ()]
        return [dict(zip(names, row, strict=True)) for row in answer.fetchall()]


def by_polars(path: Path) -> list[dict[str, Any]]:
    return pl.read_parquet(path).to_dicts()


@pytest.mark.parametrize("read", [by_arrow, by_duckdb, by_polars])
def test_every_engine_reads_the_values_that_were_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], list[dict[str, Any]]]
) -> None:
    monkeypatch.setattr("draftkeep.store.shard.ROW_GROUP_ROWS", 4)
    path, records = write(tmp_path, ODD)
    seen: set[bytes] = set()
    expected = []
    for item in records:
        header = item.parsed
        row = {name: getattr(header, name) for name in FIELD_NAMES}
        row |= {name: getattr(item, name) for name in SCHEMA.names[len(FIELD_NAMES) :]}
        if header.share_id in seen:
            row["encapsulation"] = None
        seen.add(header.share_id)
        expected.append(row)
    assert pq.ParquetFile(path).num_row_groups == 3
    assert read(path) == expected
    assert [*expected[0]] == SCHEMA.names


def in_groups(directory: Path) -> Path:
    """Eight row groups of four rows: two tenants, each with two domains of eight seconds."""
    changes = [
        {"tenant": tenant, "domain": domain, "created_s": 100 + second}
        for tenant in ("acme", "birch")
        for domain in (None, "law")
        for second in range(8)
    ]
    return write(directory, changes)[0]


# How many rows answer, and how many row groups can hold one.
QUESTIONS = {
    "tenant = 'birch'": (16, 4),
    "tenant = 'birch' AND domain = 'law'": (8, 2),
    "domain = 'law'": (16, 4),
    "domain IS NULL": (16, 4),
    "created_s >= 104": (16, 4),
    "tenant = 'acme' AND domain = 'law' AND created_s < 102": (2, 1),
    "tenant = 'cedar'": (0, 0),
    "expiry_s < 5": (0, 0),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_duckdb_scans_only_the_row_groups_that_can_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, question: str
) -> None:
    monkeypatch.setattr("draftkeep.store.shard.ROW_GROUP_ROWS", 4)
    path = in_groups(tmp_path)
    count, groups = QUESTIONS[question]
    with duckdb.connect(":memory:") as connection:
        answer = connection.read_parquet(str(path)).filter(question)
        answer = answer.aggregate("count(*), sum(octet_length(ciphertext)), sum(positions)")
        assert answer.fetchall()[0][0] == count
        plan = answer.explain("analyze")
    scanned = re.findall(r"Row Groups Scanned: (\d+) / 8", plan)
    # Where the file's own statistics say that no row can answer, there is no scan at all.
    assert [int(number) for number in scanned] == ([groups] if groups else [])


def duckdb_count(path: Path) -> int:
    with duckdb.connect(":memory:") as connection:
        query = (
            "SELECT count(ciphertext) FROM read_parquet($1) "
            "WHERE tenant = 'acme' AND domain = 'law' AND created_s < 104"
        )
        return int(connection.execute(query, [str(path)]).fetchall()[0][0])


def arrow_count(path: Path) -> int:
    field = ds.field
    wanted = (field("tenant") == "acme") & (field("domain") == "law") & (field("created_s") < 104)
    return int(ds.dataset(path).to_table(filter=wanted).num_rows)


def polars_count(path: Path) -> int:
    column = pl.col
    wanted = (column("tenant") == "acme") & (column("domain") == "law")
    scanned = pl.scan_parquet(path).filter(wanted & (column("created_s") < 104))
    return scanned.collect().height


@pytest.mark.parametrize("count", [duckdb_count, arrow_count, polars_count])
def test_what_is_pruned_is_not_even_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: Callable[[Path], int]
) -> None:
    monkeypatch.setattr("draftkeep.store.shard.ROW_GROUP_ROWS", 4)
    path = in_groups(tmp_path)
    assert count(path) == 4
    destroy(path, every=False)
    assert count(path) == 4
    destroy(path, every=True)
    with pytest.raises((duckdb.Error, OSError, pl.exceptions.PolarsError)):
        count(path)


def destroy(path: Path, *, every: bool) -> None:
    """Overwrite the data of all row groups, or of all but the one that answers."""
    data = bytearray(path.read_bytes())
    metadata = pq.read_metadata(path)
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for place in range(group.num_columns):
            column = group.column(place)
            start = column.data_page_offset
            if column.has_dictionary_page:
                start = min(start, column.dictionary_page_offset)
            if every or number != 2:
                end = start + column.total_compressed_size
                data[start:end] = b"\xff" * (end - start)
    path.write_bytes(data)
