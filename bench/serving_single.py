"""One request at a time: the engine against itself and against transformers, on the same prompts
in turn, and against itself on every domain."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from bench.agreement import agreement
from bench.intervals import Interval, speed_ratio
from bench.serving_engine import Served
from bench.serving_setup import AUTO, OFF, Bench, Figure
from bench.serving_work import ALL_DOMAINS, Prompt, turns
from bench.transformers_peer import SCHEDULES


@dataclass(slots=True)
class Runs:
    """One way's answers, request by request."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    passes: int = 0
    decoded: int = 0
    decode_s: float = 0.0
    tested: int = 0
    accepted: int = 0

    def add(self, ids: list[int], seconds: float) -> None:
        """One answer."""
        self.ids.append(ids)
        self.tokens.append(len(ids))
        self.seconds.append(seconds)

    def add_served(self, served: Served) -> None:
        """One answer of the engine."""
        self.add(served.ids[0], served.seconds)
        self.add_decoded(*served.decoded)
        self.passes += served.passes
        self.tested += sum(answer.tested for answer in served.answers)
        self.accepted += sum(answer.accepted for answer in served.answers)

    def add_decoded(self, tokens: int, seconds: float) -> None:
        """Tokens of an answer after its first, and what they alone took."""
        self.decoded += tokens
        self.decode_s += seconds

    def over(self, other: "Runs") -> Interval:
        """Tokens a second of this way over the other's."""
        return speed_ratio(
            tokens=self.tokens,
            seconds=self.seconds,
            other_tokens=other.tokens,
            other_seconds=other.seconds,
        )

    @property
    def acceptance(self) -> float:
        """The share of compared drafts that agreed with the target."""
        return self.accepted / max(1, self.tested)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return sum(self.tokens) / sum(self.seconds)

    @property
    def decode_rate(self) -> float:
        """Tokens a second without prefill; 0 where no answer had a second token."""
        return self.decoded / self.decode_s if self.decode_s > 0 else 0.0


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
        ways[_name(schedule)] = _assisted(bench, schedule)
    # Loaded and warmed up here, so that no prompt's first turn pays for it.
    bench.engine, bench.full_engine, bench.peer  # noqa: B018
    runs = alternate(bench, prompts, ways, title="one at a time")
    return _batch_one_figures(bench, prompts, runs)


def alternate(
    bench: Bench,
    prompts: Sequence[Prompt],
    ways: dict[str, Callable[[Prompt, Runs], None]],
    *,
    title: str,
) -> dict[str, Runs]:
    """Serve every prompt in every way, the order of the ways turning by one each time."""
    names = list(ways)
    runs: dict[str, Runs] = defaultdict(Runs)
    with bench.progress() as progress:
        bar = progress.add_task(title, total=len(prompts) * len(names))
        for number, prompt in enumerate(prompts):
            for name in turns(names, number):
                ways[name](prompt, runs[name])
                progress.advance(bar)
    return runs


def domains(bench: Bench) -> list[Figure]:
    """speedup_worst_domain: with the automatic lookahead against none, on every domain."""
    found: dict[str, Interval] = {}
    details: dict[str, object] = {}
    for domain in ALL_DOMAINS:
        prompts = bench.domain(domain.name, bench.sizes.domain)
        runs = alternate(
            bench,
            prompts,
            {
                "auto": lambda prompt, runs: runs.add_served(
                    bench.engine.serve([prompt], speculation=AUTO)
                ),
                "off": lambda prompt, runs: runs.add_served(
                    bench.engine.serve([prompt], speculation=OFF)
                ),
            },
            title=domain.name,
        )
        auto, off = runs["auto"], runs["off"]
        found[domain.name] = auto.over(off)
        details[domain.name] = {
            "speedup": found[domain.name].text(),
            "acceptance": auto.accepted / auto.tested if auto.tested else None,
            "identical": sum(a == b for a, b in zip(auto.ids, off.ids, strict=True)),
            "temperature": prompts[0].sampling.temperature,
        }
        bench.console.print(f"{domain.name}: {details[domain.name]}")
    worst = min(found, key=lambda name: found[name].value)
    return [
        Figure(
            metric="speedup_worst_domain",
            value=found[worst].value,
            unit="ratio",
            against="the same engine without speculation",
            interval=found[worst],
            conditions={
                "domain": worst,
                "domains": details,
                "prompts_each": bench.sizes.domain,
            },
        )
    ]


def _batch_one_figures(
    bench: Bench, prompts: Sequence[Prompt], runs: dict[str, Runs]
) -> list[Figure]:
    auto, full, off, plain = (runs[name] for name in ("auto", "auto full", "off", "generate"))
    best = max((_name(schedule) for schedule in SCHEDULES), key=lambda name: runs[name].rate)
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
        made = bench.peer.assisted(prompt, schedule)
        runs.add(made.ids, made.seconds)

    return serve


def _plain(bench: Bench, prompt: Prompt, runs: Runs) -> None:
    made = bench.peer.plain(prompt)
    runs.add(made.ids, made.seconds)
    first = bench.peer.plain(replace(prompt, max_tokens=1))
    runs.add_decoded(len(made.ids) - 1, made.seconds - first.seconds)


def _name(schedule: tuple[str, int]) -> str:
    kind, length = schedule
    return f"assisted {kind} {length}".removesuffix(" 0")
