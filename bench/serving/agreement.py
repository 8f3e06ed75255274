"""Whether two ways of serving gave the same tokens, and how near a tie the first difference was."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from bench.prompts import Prompt
from draftkeep.store.models.target import TargetModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """`identical` of `answers`; `largest_gap` is the largest difference of the two logits in
    question at a first difference (0 without any): below 1e-3 it is a near-tie of float32."""

    identical: int
    answers: int
    largest_gap: float

    def text(self) -> str:
        """For a row's conditions."""
        if self.identical == self.answers:
            return f"{self.identical} of {self.answers} identical"
        return (
            f"{self.identical} of {self.answers} identical, "
            f"largest logit gap at a first difference {self.largest_gap:.2g}"
        )


def agreement(
    target: TargetModel,
    prompts: Sequence[Prompt],
    ones: Sequence[Sequence[int]],
    others: Sequence[Sequence[int]],
) -> Agreement:
    """Compare greedy answers of the same prompts, token by token."""
    gaps = [
        gap
        for prompt, one, other in zip(prompts, ones, others, strict=True)
        if (gap := _gap(target, prompt, list(one), list(other))) is not None
    ]
    return Agreement(
        identical=len(ones) - len(gaps), answers=len(ones), largest_gap=max(gaps, default=0.0)
    )


def _gap(target: TargetModel, prompt: Prompt, one: list[int], other: list[int]) -> float | None:
    if one == other:
        return None
    shared = next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    if shared >= min(len(one), len(other)):
        return float("inf")
    ids_BT = torch.tensor([[*prompt.ids, *one[:shared]]])
    with torch.inference_mode():
        logits_V = target.model(input_ids=ids_BT).logits[0, -1].float()
    return abs(float(logits_V[one[shared]] - logits_V[other[shared]]))
