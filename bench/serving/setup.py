"""What every phase of the serving bench works with: sizes, the adapted pair, engine, baseline."""

import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from bench.adapt.adaptation import Adaptation
from bench.adapt.plan import Adapted, AdaptPlan
from bench.engine import BenchEngine
from bench.peers.peer import CONTEXT, SLOTS
from bench.peers.transformers_baseline import TransformersBaseline
from bench.prompts import Prompt, domain_named, draw_texts, make_prompts
from bench.serving.intervals import Interval
from draftkeep.serve.engine.lookahead import Speculation
from draftkeep.serve.follow import load_draft_model
from draftkeep.store.models.target import TargetModel, load_target

AUTO = Speculation(mode="auto", lookahead=8)
OFF = Speculation(mode="off")
CAPTURE_K = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much each phase measures."""

    warm: int = 3
    single: int = 16
    domain: int = 12
    rounds: int = 5
    capture_rounds: int = 14
    overhead: int = 8
    requests: int = 2000
    sample_every: int = 40


QUICK = Sizes(
    warm=1,
    single=2,
    domain=2,
    rounds=1,
    capture_rounds=2,
    overhead=2,
    requests=80,
    sample_every=16,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One metric as a phase found it. `conditions` are this metric's own."""

    metric: str
    value: float
    unit: str
    against: str = ""
    interval: Interval | None = None
    conditions: Mapping[str, object] = field(default_factory=dict)

    def bounds(self) -> dict[str, object]:
        """The interval as it stands in a row's conditions."""
        if self.interval is None:
            return {}
        return {"interval_95": [self.interval.low, self.interval.high]}


class Bench:
    """The adapted pair and everything made of it, loaded when first asked for."""

    def __init__(
        self,
        plan: AdaptPlan,
        sizes: Sizes,
        *,
        cache_dir: Path,
        console: Console,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.plan = plan
        self.sizes = sizes
        self.console = console
        self.clock = clock
        self.cache_dir = cache_dir
        self._adaptation = Adaptation(plan, cache_dir, console)

    @cached_property
    def adapted(self) -> Adapted:
        """The drafter, made by the first call."""
        return self._adaptation.run()

    @cached_property
    def target(self) -> TargetModel:
        """A target that nothing has taken over: for prompts, peers and comparisons."""
        return load_target(self.plan.target)

    @cached_property
    def baseline(self) -> TransformersBaseline:
        """transformers with the drafter's full-vocabulary form."""
        return TransformersBaseline(self.target, self.adapted.export_dir, self.clock)

    @cached_property
    def engine(self) -> BenchEngine:
        """The engine with the adapted drafter, captures on, warmed up."""
        return self._engine(full=False)

    @cached_property
    def full_engine(self) -> BenchEngine:
        """The same with the drafter's full-vocabulary form, on a target of its own."""
        return self._engine(full=True)

    def _engine(self, *, full: bool) -> BenchEngine:
        target = load_target(self.plan.target)
        engine = BenchEngine(
            target,
            slots=SLOTS,
            max_context=CONTEXT,
            capture_k=CAPTURE_K,
            speculation=AUTO,
            clock=self.clock,
        )
        if full:
            engine.use_export(self.adapted.export_dir)
        else:
            engine.use(load_draft_model(self.adapted.drafter_dir, target, gate_public=None))
        warm = self.home(self.sizes.warm, skip=0)
        for prompt in warm:
            for mode in (AUTO, OFF):
                engine.serve([prompt], speculation=mode)
        engine.serve(warm, speculation=AUTO)
        return engine

    def home(self, count: int, *, skip: int) -> list[Prompt]:
        """`count` prompts of the drafter's own domain that it was never trained on.

        They come round again where the phase asks for more than were kept.
        """
        kept = self._adaptation.measuring(self.target)
        return [kept[(skip + index) % len(kept)] for index in range(count)]

    def domain(self, name: str, count: int) -> list[Prompt]:
        """Prompts of any domain, sampled as that domain is."""
        if name == self.home(1, skip=0)[0].domain:
            return self.home(count, skip=self.sizes.single)
        domain = domain_named(name)
        texts = draw_texts(domain, count, seed=self.plan.seed + 1)
        return make_prompts(self.target, domain, texts, seed=700, max_tokens=self.plan.max_tokens)

    def progress(self) -> Progress:
        """A progress display on the bench's console."""
        return Progress(console=self.console)

    def conditions(self) -> dict[str, object]:
        """What every row says of how it was measured."""
        return {
            "target": self.target.name,
            "dtype": "float32",
            "threads": torch.get_num_threads(),
            "processor": _processor(),
            "drafter_layers": self.plan.layers,
            "drafter_vocab": self.plan.vocab,
            "drafter_acceptance": self.adapted.acceptance,
            "lookahead_most": AUTO.lookahead,
            "max_tokens": self.plan.max_tokens,
            "slots": SLOTS,
            "max_context": CONTEXT,
            "capture_k": CAPTURE_K,
            "packed_layers": self.engine.engine.stats().packed,
        }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
