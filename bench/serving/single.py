"""One request at a time: the engine against itself and against transformers."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from bench.peers.transformers_baseline import SCHEDULES, schedule_name
from bench.prompts import Prompt
from bench.serving.agreement import agreement
from bench.serving.runs import Runs, alternate
from bench.serving.setup import AUTO, OFF, Bench, Figure


def batch_one(bench: Bench) -> list[Figure]:
    """tokens_per_pass, speedup_batch1, vs_generate, vs_assisted."""
    prompts = bench.home(bench.sizes.single, skip=0)
    ways: dict[str, Callable[[Prompt, Runs], None]] = {
        "auto": lambda prompt, runs: runs.add_served(
            bench.engine.serve([prompt], speculation=AUTO)
        ),
        "auto full": lambda prompt, runs: runs.add_served(
            bench.full_engine.serve([prompt], speculation=AUTO)
        ),
        "off": lambda prompt, runs: runs.add_served(bench.engine.serve([prompt], speculation=OFF)),
        "generate": lambda prompt, runs: _plain(bench, prompt, runs),
    }
    for schedule in SCHEDULES:
        ways[schedule_name(schedule)] = _assisted(bench, schedule)
    # Loaded and warmed up here, so that no prompt's first turn pays for it.
    bench.engine, bench.full_engine, bench.baseline  # noqa: B018
    runs = alternate(bench, prompts, ways, title="one at a time")
    return _batch_one_figures(bench, prompts, runs)


def _batch_one_figures(
    bench: Bench, prompts: Sequence[Prompt], runs: dict[str, Runs]
) -> list[Figure]:
    auto, full, off, plain = (runs[name] for name in ("auto", "auto full", "off", "generate"))
    best = max(
        (schedule_name(schedule) for schedule in SCHEDULES), key=lambda name: runs[name].rate
    )
    same = {
        "auto full": agreement(bench.target, prompts, auto.ids, full.ids).text(),
        "off": agreement(bench.target, prompts, auto.ids, off.ids).text(),
        "generate": agreement(bench.target, prompts, auto.ids, plain.ids).text(),
        best: agreement(bench.target, prompts, auto.ids, runs[best].ids).text(),
    }
    shared: dict[str, object] = {
        "prompts": len(prompts),
        "acceptance": auto.acceptance,
        "same_answers": same,
        "tokens_per_s": {name: round(found.rate, 2) for name, found in runs.items()},
        "decode_tokens_per_s": {
            name: round(runs[name].decode_rate, 2)
            for name in ("auto", "auto full", "off", "generate")
        },
        "prefill": "included, but for decode_tokens_per_s",
    }

    def ratio(metric: str, drafter: str, other: Runs, against: str) -> Figure:
        mine = full if drafter == "full" else auto
        found = mine.over(other)
        return Figure(
            metric=metric,
            value=found.value,
            unit="ratio",
            against=against,
            interval=found,
            conditions=shared | {"drafter": drafter, "acceptance": mine.acceptance},
        )

    generate = "transformers generate, greedy"
    assisted = f"transformers assisted generation, {best} (the fastest)"
    ratios = (
        ("speedup_batch1", "trimmed", off, "the same engine without speculation"),
        ("vs_generate", "trimmed", plain, generate),
        ("vs_assisted", "trimmed", runs[best], assisted),
        ("vs_generate", "full", plain, generate),
        ("vs_assisted", "full", runs[best], assisted),
    )
    return [
        Figure(
            metric="tokens_per_pass",
            value=sum(auto.tokens) / auto.passes,
            unit="tokens/pass",
            conditions=shared | {"drafter": "trimmed"},
        ),
        *(ratio(*one) for one in ratios),
    ]


def _assisted(bench: Bench, schedule: tuple[str, int]) -> Callable[[Prompt, Runs], None]:
    def serve(prompt: Prompt, runs: Runs) -> None:
        made = bench.baseline.assisted(prompt, schedule)
        runs.add([made.ids], made.seconds)

    return serve


def _plain(bench: Bench, prompt: Prompt, runs: Runs) -> None:
    made = bench.baseline.plain(prompt)
    runs.add([made.ids], made.seconds)
    first = bench.baseline.plain(replace(prompt, max_tokens=1))
    runs.add_decoded(len(made.ids) - 1, made.seconds - first.seconds)
