"""What faults cost: a thousand kills counted to the last trace, and brokers away for ten minutes.

    python -m bench.faults [kills] [outages] [--kills 1000] [--seconds 600] [--fresh]

Real Kafka, PostgreSQL and processes. Rows go to bench/results/faults.jsonl. The exit status says
whether anything was lost or doubled.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.faults import outages
from bench.faults.kills import Kills, run_kills
from bench.results import RESULTS_DIR
from draftkeep.store.models.target import default_cache_dir

_PARTS = ("kills", "outages")


def main(arguments: Sequence[str]) -> int:
    """Run the parts; returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench.faults", description=__doc__)
    parser.add_argument(
        "parts", nargs="*", metavar="kills|outages", help="both where none is named"
    )
    parser.add_argument("--kills", type=int, default=Kills().kills)
    parser.add_argument("--rounds", type=int, default=Kills().rounds, help="of kills")
    parser.add_argument("--seed", type=int, default=Kills().seed)
    parser.add_argument("--seconds", type=float, default=600.0, help="of each outage")
    parser.add_argument("--fresh", action="store_true", help="forget rounds that were finished")
    parser.add_argument("--cache-dir", type=Path, default=None)
    parser.add_argument("--results-dir", type=Path, default=RESULTS_DIR)
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(_PARTS):
        parser.error(f"unknown part {unknown.pop()}; expected {' or '.join(_PARTS)}")
    parts = options.parts or _PARTS
    status = 0
    if "kills" in parts:
        status |= run_kills(
            Kills(kills=options.kills, rounds=options.rounds, seed=options.seed),
            cache_dir=(options.cache_dir or default_cache_dir() / "bench") / "faults",
            results_dir=options.results_dir,
            fresh=options.fresh,
            console=Console(),
        )
    if "outages" in parts:
        status |= outages.main(
            ["--seconds", str(options.seconds), "--results-dir", str(options.results_dir)]
        )
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
