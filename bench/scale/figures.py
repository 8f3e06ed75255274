"""The figures that docs/scaling.md rests on, and how flat each measured curve is."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.bars import BARS
from bench.report import latest
from bench.scale.points import checkpoints


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A figure that the arithmetic rests on: the metric of a bench.

    Until that is measured it is the metric's bar, else what is `assumed`. Of what swings as the
    store fills, such as a table between two vacuums, the `peak` of its curve counts.
    """

    text: str
    bench: str
    metric: str
    unit: str
    assumed: float | None = None
    digits: int = 0
    peak: bool = False

    def value(self, row: Mapping[str, Any] | None) -> float:
        """The row's value; without a row, what stands in for it."""
        if row is not None:
            return float(max(row["conditions"]["curve"].values()) if self.peak else row["value"])
        return BARS[self.metric].value if self.assumed is None else self.assumed


FIGURES = {
    "compactor": Figure(
        text="compactor, from Kafka to a synced shard, 10 KB traces",
        bench="store",
        metric="compactor_mb_s_core",
        unit="MB/s a core",
    ),
    "append": Figure(
        text="embedded log, synced, 10 KB traces",
        bench="store",
        metric="append_per_s",
        unit="traces/s",
    ),
    "forwarder": Figure(text="forwarder", bench="store", metric="forwarder_mb_s", unit="MB/s"),
    "seal": Figure(
        text="sealing a trace", bench="scale", metric="sealed_seal", assumed=200, unit="µs"
    ),
    "commit": Figure(
        text="catalog, PostgreSQL: committing a trace",
        bench="scale",
        metric="postgresql_commit",
        assumed=15,
        unit="µs",
    ),
    "swap": Figure(
        text="catalog, PostgreSQL: moving a trace to a merged shard",
        bench="scale",
        metric="postgresql_swap",
        assumed=20,
        unit="µs",
    ),
    "sqlite": Figure(
        text="catalog, SQLite: committing a trace into a large bucket",
        bench="scale",
        metric="bucket_commit",
        assumed=80,
        unit="µs",
    ),
    "row": Figure(
        text="catalog, PostgreSQL: a trace's row and indexes",
        bench="scale",
        metric="postgresql_bytes_a_trace",
        assumed=500,
        unit="B",
        peak=True,
    ),
    "clear": Figure(
        text="a trace's clear columns in a shard",
        bench="scale",
        metric="sqlite_clear_bytes_a_trace",
        assumed=60,
        unit="B",
    ),
    "expire": Figure(
        text="catalog, SQLite: expiring a trace of a large bucket",
        bench="scale",
        metric="bucket_expire",
        assumed=10,
        unit="µs",
        digits=1,
    ),
    "sweep": Figure(
        text="a sweep with nothing to do, 100,000 shards",
        bench="scale",
        metric="shards_idle_sweep",
        assumed=2500,
        unit="ms",
    ),
    "rewrite": Figure(
        text="rewriting a trace of a shard that held an erased one",
        bench="scale",
        metric="sealed_rewrite",
        assumed=100,
        unit="µs",
    ),
    "first_use": Figure(
        text="keyring: a subject's first use in a period",
        bench="scale",
        metric="keyring_first_use",
        assumed=1,
        unit="ms",
        digits=2,
    ),
    "key": Figure(
        text="keyring: a subject and an alias",
        bench="scale",
        metric="keyring_bytes_a_key",
        assumed=400,
        unit="B",
    ),
    "end": Figure(
        text="keyring: ending a key with its period",
        bench="scale",
        metric="keyring_expire",
        assumed=60,
        unit="µs",
    ),
    "wrap": Figure(
        text="keyring: wrapping a key",
        bench="scale",
        metric="keyring_wrap",
        assumed=1,
        unit="µs",
        digits=1,
    ),
}

# What the page shows of the scaling bench; its results file has more.
CURVES = {
    "sqlite": "commit swap lookup admission erase find_erased expire audit_hour audit_inventory "
    "bytes_a_trace fill_rss",
    "postgresql": "commit swap lookup admission erase find_erased expire bytes_a_trace fill_rss",
    "bucket": "commit lookup fill_rss",
    "sealed": "first_use seal append compact merge select open erase rewrite expire peak_rss",
    "keyring": "first_use known erase expire bytes_a_key",
    "shards": "commit list idle_merge idle_sweep audit_open peak_rss",
}

Rows = Mapping[tuple[str, str], Mapping[str, Any]]


def figure_table(rows: Rows) -> str:
    """Each figure with where it is from, as Markdown."""
    found = ["| figure | value | from |", "| --- | ---: | --- |"]
    for figure in FIGURES.values():
        row = rows.get((figure.bench, figure.metric))
        value = figure.value(row)
        source = f"`{figure.bench}.jsonl` `{figure.metric}`"
        when = ", not measured yet: assumed" if row is None else f", {row['date'][:10]}"
        found.append(
            f"| {figure.text} | {value:,.{figure.digits}f} {figure.unit} | {source}{when} |"
        )
    return "\n".join(found)


def flat_table(rows: Rows) -> str:
    """The curves with their ratios, as Markdown."""
    found = ["| step | unit | up to | at 1, 3, 10, 30 and 100 % of that | ratio |"]
    found.append("| --- | --- | ---: | --- | ---: |")
    for phase, steps in CURVES.items():
        for step in steps.split():
            metric = f"{phase}_{step}"
            row = rows.get(("scale", metric))
            if row is None:
                found.append(f"| `{metric}` | | | not measured yet | |")
                continue
            ratio = rows.get(("scale", f"{metric}_flat_ratio"))
            shown = "" if ratio is None else f"{ratio['value']:.2f}"
            at: int = row["conditions"]["at"]
            curve = ", ".join(_points(row["conditions"]["curve"], at))
            found.append(f"| `{metric}` | {row['unit']} | {at:,} | {curve} | {shown} |")
    return "\n".join(found)


def _points(curve: Mapping[str, float], at: int) -> Iterator[str]:
    """What was measured at each checkpoint; some steps need more than the first ones have."""
    for stop in checkpoints(at):
        value = curve.get(str(stop))
        yield "-" if value is None else f"{value:.3g}"


def newest(directory: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """The newest row of each metric, by (bench, metric); those of a quick run are left out."""
    found = {}
    for bench in sorted({figure.bench for figure in FIGURES.values()}):
        path = directory / f"{bench}.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        for row in latest(map(json.loads, lines)):
            found[bench, row["metric"]] = row
    return found


def values_of(rows: Rows) -> dict[str, float]:
    """The value of each figure: measured, else the bar."""
    return {
        name: figure.value(rows.get((figure.bench, figure.metric)))
        for name, figure in FIGURES.items()
    }
