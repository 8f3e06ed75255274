"""Rates of the log, the forwarder, the compactor, the catalog and the read path, with 10 kB traces.

    python -m bench.store [--quick] [--only NAME ...] [--state-dir DIRECTORY]

Every part prints its figures beside what the library or the disk below it can do in the same run.
MB are millions of bytes of log records; a rate a core is one a CPU-second of this process. Kafka
and PostgreSQL run on this machine and take their share of it. Rows go to bench/results/store.jsonl.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import gettempdir

from rich.console import Console
from rich.table import Table

from bench.bars import BARS
from bench.results import RESULTS_DIR, Row, append_rows
from bench.store.catalog import commit_ms
from bench.store.kafka import compactor_mb_s, forwarder_mb_s
from bench.store.log import append_per_s, emit_ms
from bench.store.read import read_positions_s
from bench.store.work import QUICK, Figure, Node, Sizes, running_node

PARTS: Mapping[str, Callable[[Node], list[Figure]]] = {
    "append": append_per_s,
    "emit": emit_ms,
    "forwarder": forwarder_mb_s,
    "compactor": compactor_mb_s,
    "catalog": commit_ms,
    "read": read_positions_s,
}
# Conditions that tell two rows of one metric apart.
_KINDS = ("database", "percentile")
_PACKAGES = (
    "cryptography",
    "cbor2",
    "kafka-python",
    "numpy",
    "pyarrow",
    "SQLAlchemy",
    "psycopg",
    "PyNaCl",
    "zstandard",
)


def main(arguments: Sequence[str]) -> int:
    """Run the bench; returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench.store", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few traces: shows that it runs")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="NAME")
    parser.add_argument(
        "--state-dir", type=Path, default=Path(gettempdir()), help="on the disk to measure"
    )
    parser.add_argument("--results-dir", type=Path, default=RESULTS_DIR)
    options = parser.parse_args(arguments)
    if len(options.only) == 1:
        _measure(options.only[0], options)
        return 0
    # Each in a process of its own, as in service: what one leaves in memory slows the next.
    command = [sys.executable, "-m", "bench.store", "--state-dir", str(options.state_dir)]
    command += ["--results-dir", str(options.results_dir), *["--quick"] * options.quick]
    found_there = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    ended = [
        subprocess.run([*command, "--only", name], env=found_there, check=False).returncode
        for name in options.only
    ]
    return int(any(ended))


def _measure(name: str, options: argparse.Namespace) -> None:
    with running_node(options.state_dir, QUICK if options.quick else Sizes()) as node:
        figures = PARTS[name](node)
    Console().print(_table(name, figures))
    for figure in figures:
        append_rows(
            "store",
            [_row(figure)],
            conditions={"quick": options.quick, "part": name} | dict(figure.conditions),
            packages=_PACKAGES,
            clock=time.time,
            directory=options.results_dir,
        )


def _row(figure: Figure) -> Row:
    return Row(metric=figure.metric, value=figure.value, unit=figure.unit, against=figure.against)


def _table(part: str, figures: Sequence[Figure]) -> Table:
    table = Table(title=part)
    for column in ("metric", "value", "unit", "bar", "met", "against"):
        table.add_column(column, justify="right" if column == "value" else "left")
    for figure in figures:
        bar = BARS.get(figure.metric)
        kind = [str(figure.conditions[name]) for name in _KINDS if name in figure.conditions]
        table.add_row(
            figure.metric,
            f"{figure.value:,.4g}",
            figure.unit,
            bar.text() if bar else "",
            bar.verdict(figure.value, None) if bar else "",
            figure.against or " ".join(kind),
        )
    return table


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
