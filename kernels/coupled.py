"""The coupled rule: drafter and target draw with the same noise, and agree or not.

With G Gumbel noise, argmax(log p + G) is a draw from p. Where the drafter draws argmax(log q + G)
with the same G, accepting exactly when both are equal and emitting the target's own token leaves
the output a function of target, seed and position alone, whatever the drafter (Daliri et al.,
2024).

V: vocabulary; W: rows of one verification, drafts + 1.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from draftkeep.errors import ModelError
from draftkeep.kernels.draw import draw
from draftkeep.kernels.noise import Noise
from draftkeep.kernels.outcome import Verified, is_end
from draftkeep.kernels.sampling import Sampling


def verify_coupled(
    logits_WV: NDArray[np.float32],
    drafts: Sequence[int],
    sampling: Sampling,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    noise: Callable[[int], Noise],
) -> Verified:
    """Accepts drafts while they are the target's own tokens; exact for every drafter.

    Row i of `logits_WV` holds the target's logits after prompt, output and drafts[:i]; there is
    one row more than drafts. Emits the target's token of every row reached: the accepted drafts,
    then the correction, or the bonus where all were accepted. Nothing follows an ending token.
    Penalties at row i see the drafts accepted before it.

    `noise(n)` gives the noise row of absolute output index n, here len(output_ids) + i. It is
    called once for each row reached, and never where temperature is 0. Raises ModelError for NaN
    logits and ValueError where the rows do not fit the drafts.
    """
    if sampling.plain_argmax:
        best_W = logits_WV.argmax(axis=-1)
        values_W = np.take_along_axis(logits_WV, best_W[:, None], axis=-1)[:, 0]
        return verify_argmax(best_W.tolist(), values_W.tolist(), drafts, sampling)

    def own(tokens: Sequence[int]) -> int:
        history = [*output_ids, *tokens] if tokens else output_ids
        return draw(
            logits_WV[len(tokens)],
            sampling,
            None if sampling.greedy else noise(len(history)),
            prompt_ids=prompt_ids,
            output_ids=history,
        )

    return _follow(own, len(logits_WV), drafts, sampling)


def verify_argmax(
    best_W: Sequence[int], values_W: Sequence[float], drafts: Sequence[int], sampling: Sampling
) -> Verified:
    """`verify_coupled` where sampling is `plain_argmax`, from each row's best id (the lowest of
    equals) and its logit, so that a whole batch can share one argmax.

    Raises ModelError where the best logit of a row that is reached is not finite, and ValueError
    where the rows do not fit the drafts.
    """

    def own(tokens: Sequence[int]) -> int:
        value = values_W[len(tokens)]
        if not math.isfinite(value):
            raise ModelError(
                f"the best logit is {value}, expected a finite number; the model's weights or its "
                "arithmetic are broken: verify the files or use a wider dtype"
            )
        return best_W[len(tokens)]

    return _follow(own, len(best_W), drafts, sampling)


def _follow(
    own: Callable[[Sequence[int]], int], rows: int, drafts: Sequence[int], sampling: Sampling
) -> Verified:
    """The rule itself: `own(tokens)` is the target's token after those of this step."""
    if rows != len(drafts) + 1:
        raise ValueError(f"{len(drafts)} drafts need one logit row more, got {rows}")
    tokens: list[int] = []
    for row, draft in enumerate(drafts):
        token = own(tokens)
        tokens.append(token)
        agreed = token == draft
        if not agreed or is_end(token, sampling):
            return Verified(tokens=tuple(tokens), accepted=row + agreed, tested=row + 1)
    tokens.append(own(tokens))
    return Verified(tokens=tuple(tokens), accepted=len(drafts), tested=len(drafts))
