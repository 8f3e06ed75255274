"""The store bench on a few traces: every part runs to its end and says what it found."""

import json
from pathlib import Path

from bench.bars import BARS
from bench.store.__main__ import PARTS, main
from bench.store.work import POSITIONS, make_trace
from draftkeep.ingest.codec import decode_body, encode_body
from draftkeep.ingest.tables import RemapTable, only_identity
from tests.services.jars import kafka_needs
from tests.services.needs import POSTGRESQL
from tests.services.skips import require

_BARRED = {
    "append": "append_per_s",
    "emit": "emit_p99_ms",
    "forwarder": "forwarder_mb_s",
    "compactor": "compactor_mb_s_core",
    "catalog": "catalog_commit_ms",
    "read": "read_positions_s_core",
}


def test_a_trace_of_the_bench_packs_to_ten_kilobytes() -> None:
    body = encode_body(make_trace(1), RemapTable.identity())
    assert 9_500 < len(body) < 10_500
    assert decode_body(body, only_identity).positions == POSITIONS


def test_a_quick_run_measures_every_bar(tmp_path: Path) -> None:
    require([*kafka_needs(), POSTGRESQL])
    options = ["--quick", "--state-dir", str(tmp_path), "--results-dir", str(tmp_path / "results")]
    assert main(options) == 0
    lines = (tmp_path / "results" / "store.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    for part in PARTS:
        barred = [row for row in rows if row["metric"] == _BARRED[part]]
        assert barred
        assert all(row["value"] > 0 and row["conditions"]["quick"] for row in barred)
    assert set(_BARRED.values()) <= BARS.keys()
