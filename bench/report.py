"""The last figures of a bench as a Markdown table, each beside the project's own bar.

    python -m bench.report serving [--since DATE] [--results-dir DIRECTORY]

Of rows that measure the same thing the newest counts, whatever run it is of; the table says when
and at which commit each was measured. Rows of a quick run and those before DATE, which is written
as in the rows, are left out.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.bars import BARS
from bench.results import RESULTS_DIR
from draftkeep.errors import InputError

# What tells two rows of one metric apart.
_KINDS = ("drafter", "sampling", "at_a_time", "database", "percentile", "outage")


def latest(rows: Iterable[dict[str, Any]], *, since: str = "") -> list[dict[str, Any]]:
    """The newest row of each metric and kind, in the order they stand in the file."""
    found: dict[tuple[object, ...], dict[str, Any]] = {}
    for row in rows:
        conditions = row["conditions"]
        if conditions.get("quick") or row["date"] < since:
            continue
        against = row["against"] if row["metric"] == "vs_peer" else ""
        key = (row["metric"], against, *(conditions.get(kind) for kind in _KINDS))
        found.pop(key, None)
        found[key] = row
    return list(found.values())


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: metric, value, 95 % interval, bar, met, conditions, measured."""
    lines = [
        "| metric | value | 95 % | bar | met | conditions | measured |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        conditions = row["conditions"]
        interval = conditions.get("interval_95")
        bounds = f"{interval[0]:.3g} to {interval[1]:.3g}" if interval else ""
        kinds = [f"{kind} {conditions[kind]}" for kind in _KINDS if kind in conditions]
        # The full-vocabulary head is reported; the bars are of the trimmed one.
        bar = None if conditions.get("drafter") == "full" else BARS.get(row["metric"])
        cells = (
            f"`{row['metric']}`",
            f"{_shown(row['value'])} {row['unit']}".removesuffix(" ratio"),
            bounds,
            bar.text() if bar else "",
            bar.verdict(row["value"], interval) if bar else "",
            "; ".join([*filter(None, [row["against"]]), *kinds]).replace("_", " "),
            f"{row['date'][:10]} {row['commit']}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(value: float) -> str:
    """Three digits, and of a count or rate all those in front of the point."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main(arguments: Sequence[str], show: Callable[[str], object] = print) -> int:
    """Print the table; returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench.report", description=__doc__)
    parser.add_argument("bench", help="the name of a results file, as serving")
    parser.add_argument("--since", default="", help="2026-01-31 or 2026-01-31T12:00")
    parser.add_argument("--results-dir", type=Path, default=RESULTS_DIR)
    options = parser.parse_args(arguments)
    path = options.results_dir / f"{options.bench}.jsonl"
    if not path.is_file():
        raise InputError(f"no results in {path}; run the bench first")
    rows = map(json.loads, path.read_text().splitlines())
    show(table(latest(rows, since=options.since)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
