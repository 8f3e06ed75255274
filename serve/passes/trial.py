"""Trial: what a model's own plain pass gives, for a runner to give again before it serves.

Shapes: T probe tokens, N wanted rows, V the head's outputs.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftkeep.errors import ModelError
from draftkeep.serve.passes.rectangle import Segment

# Of the largest logit. Passes of different shape round differently, the more the coarser the type.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 6e-2}
_TOKENS = 6


class Trial:
    """The plain logits of a few tokens, taken when this is made, and passes that must give them.

    The passes are ragged: a row behind its prompt, the same beside a fresh row with a gap of slots
    between them, and that row rewound. Raises ModelError where the model's own logits are not
    numbers, KeyError for a dtype other than float32, float16 and bfloat16, and whatever the model
    raises.
    """

    def __init__(self, model: PreTrainedModel, *, slots: int) -> None:
        ids = [(7 * index + 1) % model.config.vocab_size for index in range(_TOKENS)]
        plain_TV = _plain(model, ids)
        self._allowed = _TOLERANCE[model.dtype]
        self._largest = float(plain_TV.abs().max().clamp_min(1e-6))
        self._prompt = [Segment(slot=0, tokens=ids[:2], start=0)]
        behind = Segment(slot=0, tokens=ids[2:], start=2, want=4)
        self._passes: list[tuple[list[Segment], Tensor]] = [([behind], plain_TV[2:])]
        if (last := slots - 1) > 0:
            fresh = Segment(slot=last, tokens=ids[:3], start=0, want=3)
            rewound = Segment(slot=last, tokens=ids[2:], start=2, want=4)
            self._passes += [
                ([behind, fresh], torch.cat([plain_TV[2:], plain_TV[:3]])),
                ([rewound], plain_TV[2:]),
            ]

    def difference(
        self,
        prefill: Callable[[Sequence[Segment]], None],
        forward: Callable[[Sequence[Segment]], Tensor],
    ) -> str | None:
        """In words how far these passes are from the plain ones, None where they agree.

        The slots are left with the probe's tokens. Raises whatever the passes raise.
        """
        prefill(self._prompt)
        gaps = [
            float((forward(segments) - plain_NV).abs().max()) / self._largest
            for segments, plain_NV in self._passes
        ]
        if all(gap <= self._allowed for gap in gaps):
            return None
        worst = max(gap if gap == gap else torch.inf for gap in gaps)
        return (
            f"cached passes differ from plain ones by {worst:.2g} of the largest logit (allowed "
            f"{self._allowed:g})"
        )


def _plain(model: PreTrainedModel, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        ids_1T = torch.tensor([ids], device=model.device)
        logits_TV: Tensor = model(input_ids=ids_1T, use_cache=False).logits[0].float()
    if not bool(torch.isfinite(logits_TV).all()):
        raise ModelError(
            f"the model gives values that are not numbers for {_TOKENS} plain tokens; its weights "
            "are damaged or its precision is too low: load another copy"
        )
    return logits_TV
