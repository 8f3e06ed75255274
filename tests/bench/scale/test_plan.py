"""The arithmetic of the page on scaling, on figures that can be worked out by hand."""

import json
from pathlib import Path

from bench.scale.figures import CURVES, FIGURES, flat_table, newest, values_of
from bench.scale.limits import LIMITS, limit_table
from bench.scale.load import LOADS, Load, lines, load_table, short
from bench.scale.plan import PAGE, fill, main

ROUND = {
    "compactor": 50.0,
    "append": 5000.0,
    "forwarder": 100.0,
    "seal": 200.0,
    "commit": 15.0,
    "swap": 25.0,
    "sqlite": 50.0,
    "row": 500.0,
    "clear": 60.0,
    "expire": 10.0,
    "sweep": 2000.0,
    "rewrite": 100.0,
    "first_use": 2.0,
    "key": 400.0,
    "end": 50.0,
    "wrap": 1.0,
}


def test_each_line_is_what_one_works_out_by_hand() -> None:
    load = Load(requests_s=10_000, sampling_rate=0.1)
    found = {text: function(load, ROUND) for text, function in lines()}
    assert set(ROUND) == set(FIGURES)
    assert found["captured traces/s"] == "1 k"
    assert found["MB/s in the log"] == "10"
    assert found["cores that seal, on the serving nodes"] == "0.2"
    assert found["forwarders at full speed"] == "0.1"
    assert found["compactor cores"] == "0.2"
    assert found["partitions"] == "3"
    # 10 MB/s over 7 d and 23 parts of 24, three times.
    assert found["brokers' disks, three replicas, a ttl"] == "17.4 TB"
    assert found["shards' disks or buckets"] == "6.05 TB"
    # An hour of 10 MB/s in shards of 128 MiB, and 168 of those hours.
    assert found["shards in an expiry bucket"] == "268"
    assert found["shards"] == "45.1 k"
    assert found["sweep with nothing to do, s"] == "0.9"
    assert found["catalog: traces"] == "605 M"
    assert found["catalog: bytes"] == "302 GB"
    assert found["catalog: busy, of one connection"] == "4 %"
    assert found["an expiry bucket's traces"] == "3.6 M"
    assert found["its expiry, s"] == "36"
    assert found["keyring: aliases"] == "121 M"
    assert found["keyring: bytes"] == "48.4 GB"
    assert found["keyring: busy with first uses"] == "40 %"
    assert found["keyring: ending an hour's keys, s"] == "36"
    assert found["and core seconds"] == "11"


def test_a_partition_has_one_reader_and_a_bucket_at_least_one_shard() -> None:
    found = dict(lines())
    busy, idle = Load(requests_s=100_000, sampling_rate=1.0), Load(requests_s=1, sampling_rate=0.1)
    assert found["partitions"](busy, ROUND) == "40"
    assert found["shards"](idle, ROUND) == "168"
    assert [short(value) for value in (0.0123, 9.99, 123.4, 999.9, 5e6, 6.05e12)] == [
        "0.012",
        "10",
        "123",
        "1 k",
        "5 M",
        "6.05 T",
    ]


def test_the_parts_stand_in_the_order_in_which_they_stop() -> None:
    stops = {limit.part: limit.traces_s(ROUND) for limit in LIMITS}
    assert stops["keyring, first uses"] == 2500
    assert stops["catalog in SQLite, expiry"] == 100_000
    assert stops["catalog in PostgreSQL, one connection"] == 25_000
    assert stops["one compactor, one partition"] == 5000
    listed = [line.split(" | ")[0].removeprefix("| ") for line in limit_table(ROUND).splitlines()]
    assert listed[2:] == sorted(stops, key=lambda part: stops[part])


def test_the_page_takes_the_newest_rows_and_says_what_is_assumed(tmp_path: Path) -> None:
    results, page = tmp_path / "results", tmp_path / "page.md"
    results.mkdir()
    conditions = {"at": 1000, "curve": {"100": 9, "1000": 3}}
    row = {"date": "2026-01-02T03:04", "unit": "ms", "conditions": conditions}
    rows = [
        row | {"metric": "sealed_seal", "value": 7},
        row | {"metric": "sealed_seal", "value": 123},
        row | {"metric": "sealed_seal_flat_ratio", "value": 1.25},
        row | {"metric": "postgresql_bytes_a_trace", "value": 3},
    ]
    (results / "scale.jsonl").write_text("".join(json.dumps(item) + "\n" for item in rows))
    page.write_text(PAGE.read_text())
    assert main(["--write", "--page", str(page), "--results-dir", str(results)]) == 0
    text = page.read_text()
    assert "| sealing a trace | 123 µs | `scale.jsonl` `sealed_seal`, 2026-01-02 |" in text
    assert "not measured yet: assumed" in text
    assert "| `sealed_seal` | ms | 1,000 | -, -, 9, -, 3 | 1.25 |" in text
    assert "a trace's row and indexes | 9 B |" in text
    found = newest(results)
    assert values_of(found)["seal"] == 123
    assert load_table(values_of(found)) in text
    assert main(["--write", "--page", str(page), "--results-dir", str(results)]) == 0
    assert page.read_text() == text
    assert len(flat_table({}).splitlines()) == 2 + sum(len(v.split()) for v in CURVES.values())


def test_only_what_lies_between_the_marks_is_replaced() -> None:
    page = "a\n<!-- x: begin -->\nold\n<!-- x: end -->\nb\n"
    assert fill(page, {"x": "new"}) == "a\n<!-- x: begin -->\n\nnew\n\n<!-- x: end -->\nb\n"
    assert all(f"<!-- {name}: end -->" in PAGE.read_text() for name in ("loads", "limits"))
    assert len(load_table(ROUND).splitlines()[0].split("|")) == len(LOADS) + 3
