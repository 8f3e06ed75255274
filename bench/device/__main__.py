"""Checks and times every kernel, passes as CUDA graphs and the engine on one device.

    python -m bench.device [--device cuda] [--full]

Needs torch, transformers and numpy, and of draftkeep only kernels and the engine. Every kernel is
compared with a float64 reference before it is timed; a wrong one ends the run with status 1.
`--full` uses the sizes of a real service. Times are medians; ratios are against plain torch in the
same run. Rows go to bench/results/device.jsonl.
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import torch

from bench.device import engine, kernels
from bench.results import Row, append_rows
from draftkeep.errors import DraftkeepError

CHECKS: tuple[Callable[..., list[Row]], ...] = (
    kernels.check_topk,
    kernels.check_forward_kl,
    kernels.check_rules,
    engine.check_passes,
    engine.check_engine,
)


def main() -> int:
    """Run everything; 0 where every check held."""
    parser = argparse.ArgumentParser(description="Check and time kernels and engine.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--full", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rows, failed = run(CHECKS, device, full=arguments.full)
    append_rows(
        "device",
        rows,
        conditions={"device": _name(device), "full": arguments.full},
        packages=("torch", "transformers", "numpy"),
        clock=time.time,
    )
    return 1 if failed else 0


def run(
    checks: Sequence[Callable[..., list[Row]]], device: torch.device, *, full: bool
) -> tuple[list[Row], list[str]]:
    """Run and print the checks; their rows, and the names of those that did not hold."""
    rows: list[Row] = []
    failed = []
    for check in checks:
        try:
            found = check(device, full=full)
        except (AssertionError, DraftkeepError) as error:
            failed.append(check.__name__)
            print(f"FAILED {check.__name__}: {error}")
            continue
        rows += found
        for row in found:
            print(f"{row.metric:32} {row.value:12.4g} {row.unit:10} {row.against}")
    return rows, failed


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    sys.exit(main())
