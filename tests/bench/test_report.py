"""The table of a bench's last figures."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.bars import BARS, Bar
from bench.report import latest, main
from draftkeep.errors import InputError


def _row(metric: Any, value: Any, against: Any = "", **conditions: Any) -> Any:
    return {
        "date": "2026-01-02T03:04:05+00:00",
        "commit": "abc",
        "metric": metric,
        "value": value,
        "unit": "ratio",
        "against": against,
        "conditions": conditions,
    }


def test_the_newest_row_of_each_kind_counts() -> None:
    rows = [
        _row("vs_generate", 1.0, drafter="trimmed"),
        _row("vs_generate", 2.0, drafter="full"),
        _row("vs_peer", 3.0, "one engine, plain"),
        _row("vs_generate", 4.0, drafter="trimmed"),
        _row("vs_peer", 5.0, "another engine"),
        _row("vs_peer", 6.0, "one engine, plain"),
        _row("vs_generate", 7.0, drafter="trimmed", quick=True),
        _row("capture_cost", 8.0, "worded one way"),
        _row("capture_cost", 9.0, "worded another way"),
    ]
    assert [row["value"] for row in latest(rows)] == [2.0, 4.0, 5.0, 6.0, 9.0]
    later = [*rows, _row("vs_generate", 0.5, drafter="trimmed") | {"date": "2026-01-03T00:00"}]
    assert [row["value"] for row in latest(later, since="2026-01-02T04")] == [0.5]
    assert len(latest(later, since="2026-01-02")) == 5


@pytest.mark.parametrize(
    ("bar", "value", "interval", "said"),
    [
        (Bar(value=2.0), 2.0, None, "yes"),
        (Bar(value=2.0), 1.9, [1.8, 1.95], "no"),
        (Bar(value=2.0), 1.9, [1.8, 2.1], "no, within the interval"),
        (Bar(value=2.0), 2.1, [1.9, 2.3], "yes, within the interval"),
        (Bar(value=0.1, least=False), 0.1, [0.05, 0.1], "yes"),
        (Bar(value=0.1, least=False), 0.2, [0.15, 0.3], "no"),
        (Bar(value=0.1, least=False), 0.2, [0.05, 0.3], "no, within the interval"),
    ],
)
def test_a_verdict_is_by_the_value_and_says_what_chance_could_change(
    bar: Any, value: Any, interval: Any, said: Any
) -> None:
    assert bar.verdict(value, interval) == said


def test_it_prints_one_line_a_figure(tmp_path: Path) -> None:
    rows = [
        _row("tokens_per_pass", 5.4557),
        _row("vs_generate", 2.0, "generate", drafter="full", interval_95=[1.0, 3.0]),
        _row("overhead_share", 0.134, sampling="sampled", at_a_time=8, interval_95=[0.12, 0.15]),
    ]
    (tmp_path / "serving.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown: list[str] = []
    assert main(["serving", "--results-dir", str(tmp_path)], shown.append) == 0
    lines = shown[0].splitlines()[2:]
    assert lines == [
        "| `tokens_per_pass` | 5.46 |  | >= 3 | yes |  | 2026-01-02 abc |",
        "| `vs_generate` | 2 | 1 to 3 |  |  | generate; drafter full | 2026-01-02 abc |",
        "| `overhead_share` | 0.134 | 0.12 to 0.15 | <= 0.1 | no | sampling sampled; at a time 8 "
        "| 2026-01-02 abc |",
    ]
    with pytest.raises(InputError, match="run the bench"):
        main(["other", "--results-dir", str(tmp_path)])


def test_bars_are_of_metrics_that_the_bench_reports() -> None:
    text = (Path(__file__).parents[2] / "docs" / "benchmarks.md").read_text()
    assert all(f"`{metric}`" in text for metric in BARS)
