"""Eight requests at a time: the engine against itself and against transformers one by one."""

from collections.abc import Callable

from bench.peers.peer import SLOTS
from bench.peers.transformers_baseline import SCHEDULES, schedule_name
from bench.prompts import Prompt
from bench.serving.runs import Runs, alternate
from bench.serving.setup import AUTO, OFF, Bench, Figure

Way = Callable[[list[Prompt], Runs], None]


def batch_eight(bench: Bench) -> list[Figure]:
    """batch8_vs_assisted and batch8_vs_plain, by rounds of eight prompts."""
    rounds = bench.sizes.rounds
    schedule = _fastest(bench)
    ways: dict[str, Way] = {
        "auto": lambda prompts, runs: runs.add_served(
            bench.engine.serve(prompts, speculation=AUTO)
        ),
        "off": lambda prompts, runs: runs.add_served(bench.engine.serve(prompts, speculation=OFF)),
        "assisted": lambda prompts, runs: _assisted(bench, prompts, schedule, runs),
    }
    bench.engine.serve(bench.home(SLOTS, skip=0), speculation=AUTO)
    groups = [bench.home(SLOTS, skip=SLOTS * number) for number in range(rounds)]
    runs = alternate(bench, groups, ways, title="eight at a time")
    conditions = {
        "rounds": rounds,
        "tokens_per_s": {name: round(found.rate, 2) for name, found in runs.items()},
    }
    others = (
        (
            "batch8_vs_assisted",
            "assisted",
            "eight assisted generations of transformers one after another, "
            f"{schedule_name(schedule)}",
        ),
        ("batch8_vs_plain", "off", "the same engine without speculation, same eight at a time"),
    )
    figures = []
    for metric, other, against in others:
        ratio = runs["auto"].over(runs[other])
        figures.append(
            Figure(
                metric=metric,
                value=ratio.value,
                unit="ratio",
                against=against,
                interval=ratio,
                conditions=conditions,
            )
        )
    return figures


def _assisted(bench: Bench, prompts: list[Prompt], schedule: tuple[str, int], runs: Runs) -> None:
    made = [bench.baseline.assisted(prompt, schedule) for prompt in prompts]
    runs.add([one.ids for one in made], sum(one.seconds for one in made))


def _fastest(bench: Bench) -> tuple[str, int]:
    """The peer's own best schedule on a few prompts."""
    prompts = bench.home(bench.sizes.warm, skip=SLOTS)
    rates = {}
    for schedule in SCHEDULES:
        runs = Runs()
        _assisted(bench, prompts, schedule, runs)
        rates[schedule] = runs.rate
    return max(rates, key=lambda schedule: rates[schedule])
