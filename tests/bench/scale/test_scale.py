"""The scaling bench: a small run of it, stopped and taken up again, and what it says of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from bench.scale.__main__ import main
from bench.scale.points import Point, Points, checkpoints
from bench.scale.probes import Probes
from bench.scale.traffic import Traffic
from draftkeep.ingest.header import decode_header
from draftkeep.store.catalog import Catalog
from draftkeep.store.schema import trace_ids
from draftkeep.store.shard import CLEAR_SCHEMA

SMALL = [
    "--headers=4000",
    "--per-bucket=400",
    "--bucket=500",
    "--batch=128",
    "--traces=100",
    "--subjects=20",
    "--keys=100",
    "--shards=100",
]


def _point(at: int, phase: str = "a", step: str = "b") -> Point:
    return Point(phase=phase, step=step, at=at, value=1.5, unit="ms")


def test_headers_are_a_function_of_the_seed_and_real_ones() -> None:
    traffic = Traffic(per_bucket=100, tenants=3)
    first, second = traffic.batches(90, 20)
    assert (len(first), len(second)) == (10, 10)
    assert first.bucket_s + 3600 == second.bucket_s
    assert first.trace_rows() == traffic.batches(90, 10)[0].trace_rows()
    other = Traffic(per_bucket=100, tenants=3, seed=2).batches(90, 10)[0]
    assert first.trace_rows() != other.trace_rows()
    for header in first.headers() + second.headers():
        assert decode_header(header.encode()) == header
    assert first.table().schema == CLEAR_SCHEMA
    records = {traffic.period(0, tenant).period_id for tenant in range(3)}
    assert {header.period_id for header in first.headers()} <= records


def test_points_survive_a_kill_and_lose_what_lies_beyond_the_data(tmp_path: Path) -> None:
    path = tmp_path / "points.jsonl"
    points = Points(path)
    for at in (1, 3, 10):
        points.add(_point(at))
    points.add(_point(10, phase="other"))
    path.write_text(path.read_text() + '{"phase": "a", "st')
    again = Points(path)
    assert again.of("a", "b") == points.of("a", "b")
    again.forget("a", beyond=3)
    assert [point.at for point in Points(path).of("a", "b")] == [1, 3]
    assert Points(path).has("other", "b", 10)
    assert not Points(path).has("a", "b", 10)
    assert checkpoints(10_000_000) == [100_000, 300_000, 1_000_000, 3_000_000, 10_000_000]


def test_a_stopped_run_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, results = tmp_path / "data", tmp_path / "results"
    command = [str(directory), *SMALL, "--results-dir", str(results), "--only", "sqlite"]
    measure = Probes.measure

    def stopped(self: Probes, at: int, last: Any) -> None:
        if at == 400:
            raise KeyboardInterrupt
        measure(self, at, last)

    with monkeypatch.context() as patched:
        patched.setattr(Probes, "measure", stopped)
        assert main(command) == 130
    assert not results.exists()
    assert main(command) == 0
    points = Points(directory / "points.jsonl")
    for step in ("lookup", "erase", "audit_hour", "peak_rss"):
        assert [point.at for point in points.of("sqlite", step)] == checkpoints(4000)
    catalog = Catalog.open(directory / "sqlite" / "catalog.db")
    with catalog.read() as connection:
        rows = connection.scalar(sa.select(sa.func.count()).select_from(trace_ids))
    catalog.close()
    # Two buckets were full and expired at checkpoints: those at 1,200 and at 4,000 headers.
    assert rows == 4000 - 2 * 400
    assert main([str(directory), "--headers=5", "--only", "sqlite"]) == 1


def test_a_small_run_writes_its_rows(tmp_path: Path) -> None:
    directory, results = tmp_path / "data", tmp_path / "results"
    phases = ["bucket", "sealed", "keyring", "shards"]
    fixed = [str(directory), *SMALL, "--results-dir", str(results)]
    assert main([*fixed, "--only", *phases]) == 0
    rows = [json.loads(line) for line in (results / "scale.jsonl").read_text().splitlines()]
    found = {row["metric"]: row for row in rows}
    wanted = {
        "bucket_expire",
        "sealed_seal",
        "sealed_compact",
        "sealed_open",
        "sealed_rewrite",
        "keyring_first_use",
        "keyring_erase",
        "shards_commit",
        "shards_idle_sweep",
    }
    assert wanted <= set(found)
    assert all(row["value"] > 0 for row in rows)
    ratio = found["sealed_compact_flat_ratio"]
    curve = ratio["conditions"]["curve"]
    assert ratio["value"] == pytest.approx(curve["100"] / curve["10"], rel=1e-3)
    assert ratio["against"] == "the same with 10"
