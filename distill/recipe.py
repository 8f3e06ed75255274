"""Recipe: how a drafter is trained, and the plan that follows from it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftkeep.errors import ConfigError

_WARM_UP_STEPS = 10
_FLOOR = 0.02
_SORTED_BATCHES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How to train. The run ends at `seconds` of training or after `steps`, whichever comes first.

    The learning rate warms up over ten steps and falls along a cosine to 2 % at the end of that
    budget. With `steps` alone the result depends on inputs and `seed` only (on one machine, with
    one number of threads). `seconds` counts updates, not measuring or checkpoints. `bfloat16`
    multiplies in that format and keeps weights and sums in float32.
    """

    learning_rate: float
    batch_traces: int
    seed: int
    seconds: float | None = None
    steps: int | None = None
    checkpoint_s: float = 30.0
    bfloat16: bool = False

    def __post_init__(self) -> None:
        if self.seconds is None and self.steps is None:
            raise ConfigError("a training recipe has no end; give seconds or steps")

    def fraction(self, step: int, seconds: float) -> float:
        """How much of the budget is used, 0 to 1."""
        used = step / self.steps if self.steps is not None else 0.0
        if self.seconds is not None:
            used = max(used, seconds / self.seconds)
        return min(used, 1.0)

    def rate(self, step: int, seconds: float) -> float:
        """The learning rate of the update after `step` updates and `seconds`."""
        warm = min(1.0, (step + 1) / _WARM_UP_STEPS)
        cosine = 0.5 * (1.0 + math.cos(math.pi * self.fraction(step, seconds)))
        return self.learning_rate * warm * (_FLOOR + (1.0 - _FLOOR) * cosine)

    def plan(self, epoch: int, tokens: Sequence[int]) -> list[list[int]]:
        """The batches of one pass over traces of these lengths: every index once.

        Traces of like length share a batch, which leaves little padding. A function of seed,
        epoch and lengths alone, so that a resumed run finds the same plan.
        """
        rng = np.random.default_rng([self.seed, epoch])
        order = rng.permutation(len(tokens)).tolist()
        size = self.batch_traces
        batches = []
        for start in range(0, len(order), size * _SORTED_BATCHES):
            near = sorted(order[start : start + size * _SORTED_BATCHES], key=tokens.__getitem__)
            batches += [near[at : at + size] for at in range(0, len(near), size)]
        return [batches[index] for index in rng.permutation(len(batches))]
