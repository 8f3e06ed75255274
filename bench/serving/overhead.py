"""What serving costs beside the passes of the models: time of a step, and memory over time."""

import cProfile
import pstats
from dataclasses import replace
from pathlib import Path

from bench.peers.peer import SLOTS
from bench.prompts import Prompt
from bench.serving.intervals import share_interval, slope
from bench.serving.setup import AUTO, Bench, Figure
from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine.request import StepReport

_PAGE_KB = 4
_SHORT = 4
_WARM_SHARE = 0.1
_PROFILE_LINES = 8


def overhead(bench: Bench) -> list[Figure]:
    """The share of step time outside the models' passes, greedy and sampled, alone and by eight."""
    figures = []
    nucleus = Sampling(temperature=0.7, top_p=0.9, eos_ids=bench.target.eos_ids)
    with bench.progress() as progress:
        bar = progress.add_task("engine overhead", total=4)
        for kind, sampling in (("greedy", None), ("sampled", nucleus)):
            prompts = [
                prompt if sampling is None else replace(prompt, sampling=sampling)
                for prompt in bench.home(bench.sizes.overhead, skip=0)
            ]
            for at_a_time in (1, SLOTS):
                figures.append(_overhead(bench, prompts, kind, at_a_time))
                progress.advance(bar)
    return figures


def rss(bench: Bench) -> list[Figure]:
    """rss_slope: resident memory over many short requests, after a tenth of them."""
    prompts = [
        replace(prompt, max_tokens=_SHORT) for prompt in bench.home(bench.plan.measure, skip=0)
    ]
    counts: list[float] = []
    sizes_kb: list[float] = []
    total, step = bench.sizes.requests, bench.sizes.sample_every
    with bench.progress() as progress:
        bar = progress.add_task("memory", total=total)
        for done in range(0, total, step):
            wave = [prompts[(done + at) % len(prompts)] for at in range(step)]
            bench.engine.serve(wave, speculation=AUTO)
            counts.append((done + step) / 1000)
            sizes_kb.append(rss_kb())
            progress.advance(bar, step)
    skip = int(len(counts) * _WARM_SHARE)
    found = slope(counts[skip:], sizes_kb[skip:])
    return [
        Figure(
            metric="rss_slope",
            value=found.value,
            unit="kB/1000 requests",
            interval=found,
            conditions={
                "requests": total,
                "tokens_each": _SHORT,
                "rss_kb_first": sizes_kb[skip],
                "rss_kb_last": sizes_kb[-1],
            },
        )
    ]


def rss_kb() -> float:
    """Resident memory of this process (Linux)."""
    return float(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_KB


def _overhead(bench: Bench, prompts: list[Prompt], kind: str, at_a_time: int) -> Figure:
    reports: list[StepReport] = []
    for at in range(0, len(prompts), at_a_time):
        reports += bench.engine.serve(prompts[at : at + at_a_time], speculation=AUTO).reports
    total_s = sum(report.total_s for report in reports)
    draft_s = sum(report.draft_s for report in reports)
    verify_s = sum(report.verify_s for report in reports)
    share = share_interval(
        [report.total_s - report.draft_s - report.verify_s for report in reports],
        [report.total_s for report in reports],
    )
    return Figure(
        metric="overhead_share",
        value=share.value,
        unit="share of step time",
        interval=share,
        conditions={
            "sampling": kind,
            "at_a_time": at_a_time,
            "steps": len(reports),
            "draft_share": draft_s / total_s,
            "verify_share": verify_s / total_s,
            "profile": _profile(bench, prompts[:at_a_time]),
        },
    )


def _profile(bench: Bench, prompts: list[Prompt]) -> dict[str, float]:
    """Own functions with the largest share of a profiled run's time, of their own calls alone."""
    profiler = cProfile.Profile()
    profiler.enable()
    bench.engine.serve(prompts, speculation=AUTO)
    profiler.disable()
    stats = pstats.Stats(profiler)
    total = stats.total_tt  # type: ignore[attr-defined]
    own = {
        f"{Path(file).stem}.{name}": values[2] / total
        for (file, _, name), values in stats.stats.items()  # type: ignore[attr-defined]
        if "draftkeep" in file
    }
    most = sorted(own, key=lambda name: -own[name])[:_PROFILE_LINES]
    return {name: round(own[name], 4) for name in most}
