"""What the shape and timing of a stream tell about its prompt, in each mode, and what hiding costs.

    python -m bench.streams [--quick]

A real node over loopback with the adapted drafter answers a few prompts again and again, one at a
time. Somebody who sees only event times and sizes guesses the prompt by nearest neighbour. Rows go
to bench/results/streams.jsonl.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.adapt.adaptation import Adaptation
from bench.adapt.plan import AdaptPlan, shrunk
from bench.prompts import HOME, domain_named
from bench.results import RESULTS_DIR, Row, append_rows
from bench.streams.attack import VIEWS, accuracy, delay_s, stock
from bench.streams.client import Stream, StreamServer, record
from draftkeep.store.models.target import default_cache_dir

_PACKAGES = ("numpy", "torch", "transformers", "fastapi", "uvicorn")
_MODES = ("stock", "per token, bare", "default", "paced")


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """How many prompts, how often each, and how long the answers may be."""

    prompts: int = 12
    repeats: int = 6
    max_tokens: int = 48
    tick_s: float = 0.05
    temperature: float = 0.3


def collect(
    study: Study, plan: AdaptPlan, cache_dir: Path, console: Console
) -> dict[str, list[Stream]]:
    """Every prompt's streams in every mode; the same seeds, so the same texts, in each."""
    adaptation = Adaptation(plan, cache_dir, console)
    drafter_dir = adaptation.run().drafter_dir
    texts = adaptation.texts()[: study.prompts]
    found: dict[str, list[Stream]] = {}
    for release, modes in (("immediate", (False, True)), ("paced", (True,))):
        directory = cache_dir / f"streams-{release}"
        with (
            StreamServer(
                directory,
                drafter_dir=drafter_dir,
                target=plan.target,
                release=release,
                tick_s=study.tick_s,
            ) as server,
            httpx.Client(base_url=server.url, trust_env=False) as client,
            Progress(console=console) as progress,
        ):
            for padded in modes:
                name = "paced" if release == "paced" else _MODES[2 if padded else 1]
                bar = progress.add_task(name, total=study.prompts * study.repeats)
                found[name] = []
                for number in range(study.prompts * study.repeats):
                    prompt = number % study.prompts
                    body = _body(plan.target, texts[prompt], study, seed=number)
                    stream = record(client, body, key=server.key, prompt=prompt, padded=padded)
                    found[name].append(stream)
                    progress.advance(bar)
    found["stock"] = [stock(stream) for stream in found[_MODES[1]]]
    return found


def report(found: Mapping[str, Sequence[Stream]], study: Study) -> list[Row]:
    """Attack accuracy by mode and view, bytes and delay by mode."""
    rows = []
    chance = f"chance {1 / study.prompts:.3f}"
    for mode in _MODES:
        for view, features in VIEWS.items():
            rows.append(
                Row(
                    metric=f"prompt_guessed, {mode}, by {view}",
                    value=accuracy(found[mode], features),
                    unit="share",
                    against=chance,
                )
            )
    bare = found[_MODES[1]]
    for mode in _MODES:
        characters = sum(len(event.text) for one in found[mode] for event in one.events)
        rows.append(
            Row(
                metric=f"bytes_per_character, {mode}",
                value=sum(one.bytes for one in found[mode]) / max(1, characters),
                unit="B",
            )
        )
        late = [delay_s(one, other) for one, other in zip(found[mode], bare, strict=True)]
        rows.append(
            Row(
                metric=f"delay_per_character, {mode}",
                value=sum(late) / len(late),
                unit="s",
                against="the same texts, one bare event a token",
            )
        )
    return rows


def main(arguments: Sequence[str]) -> int:
    """Run the bench; returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench.streams", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a toy model: shows that it runs")
    parser.add_argument("--prompts", type=int, default=Study().prompts)
    parser.add_argument("--repeats", type=int, default=Study().repeats)
    parser.add_argument("--tick", type=float, default=Study().tick_s, help="seconds, when paced")
    parser.add_argument("--temperature", type=float, default=Study().temperature)
    parser.add_argument("--cache-dir", type=Path, default=None)
    parser.add_argument("--results-dir", type=Path, default=RESULTS_DIR)
    options = parser.parse_args(arguments)
    plan = AdaptPlan()
    study = Study(
        prompts=options.prompts,
        repeats=options.repeats,
        tick_s=options.tick,
        temperature=options.temperature,
    )
    if options.quick:
        plan, study = shrunk(plan), Study(prompts=3, repeats=2, max_tokens=12, tick_s=0.01)
    cache_dir = options.cache_dir or default_cache_dir() / "bench"
    cache_dir.mkdir(parents=True, exist_ok=True)
    console = Console()
    found = collect(study, plan, cache_dir, console)
    rows = report(found, study)
    table = Table("measure", "value", "unit", "against")
    for row in rows:
        table.add_row(row.metric, f"{row.value:.4g}", row.unit, row.against)
    console.print(table)
    append_rows(
        "streams",
        rows,
        conditions={
            "target": plan.target,
            "prompts": study.prompts,
            "repeats": study.repeats,
            "max_tokens": study.max_tokens,
            "temperature": study.temperature,
            "tick_s": study.tick_s,
            "one_stream_at_a_time": True,
            "quick": options.quick,
        },
        packages=_PACKAGES,
        clock=time.time,
        directory=options.results_dir,
    )
    return 0


def _body(model: str, text: str, study: Study, *, seed: int) -> dict[str, object]:
    return {
        "model": model,
        "messages": [
            {"role": "system", "content": domain_named(HOME).system},
            {"role": "user", "content": text},
        ],
        "temperature": study.temperature,
        "max_completion_tokens": study.max_tokens,
        "seed": seed,
    }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
