"""What the bench's drafter is adapted on, and what came of it."""

import json
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptPlan:
    """What to adapt on and for how long.

    The first `measure` prompts of the draw are kept for measuring and the next `held_out` for
    judging the drafter; neither is trained on. Training goes on in rounds of `steps` updates
    until replay acceptance on the held-out prompts reaches `goal`, at most `rounds` of them.
    """

    target: str = "smollm2"
    measure: int = 40
    held_out: int = 48
    train: int = 900
    max_tokens: int = 64
    context: int = 256
    slots: int = 16
    capture_k: int = 32
    layers: int = 2
    vocab: int = 4096
    steps: int = 1500
    rounds: int = 3
    batch_traces: int = 16
    learning_rate: float = 2e-3
    goal: float = 0.75
    seed: int = 21

    @property
    def key(self) -> str:
        """Names the directory of this plan's results."""
        text = json.dumps(asdict(self), sort_keys=True)
        return sha256(text.encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """A trained drafter and what it took.

    `digest` names it under `drafters/`, `export_dir` is its full-vocabulary form for other
    engines. `capture_s` made the traces, `train_s` are the updates alone. `acceptance` is
    held-out replay acceptance, `cold` that of the untrained drafter.
    """

    digest: str
    directory: Path
    export_dir: Path
    capture_s: float
    train_s: float
    positions: int
    updates: int
    acceptance: float
    cold: float
    bfloat16: bool

    @property
    def drafter_dir(self) -> Path:
        """Where the drafter lies."""
        return self.directory / "drafters" / self.digest

    @property
    def seconds(self) -> float:
        """Traces and training together."""
        return self.capture_s + self.train_s


def shrunk(plan: AdaptPlan) -> AdaptPlan:
    """The same on the toy target, in seconds: shows that the bench runs, measures nothing."""
    return replace(
        plan,
        target="tiny",
        measure=6,
        held_out=6,
        train=48,
        max_tokens=24,
        layers=1,
        vocab=256,
        steps=40,
        rounds=1,
        goal=0.3,
    )
