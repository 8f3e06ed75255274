"""Drawing one token from a row of logits, with a keyed row of noise.

The definition is argmax(process(logits) + noise). A token can only win where its score is within
the reach of the noise, so everything else is left out before the noise is worked out.

V: entries of the row; M: those that can still win.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftkeep.kernels.noise import GumbelRow, Noise
from draftkeep.kernels.processors import finite_max, penalised, process, support, tempered
from draftkeep.kernels.sampling import Sampling

# Far above what rounding moves a score or a noise by, far below what lets many more ids in.
_SLACK = 1e-6


def choose(scores_V: NDArray[np.float64], noise_V: NDArray[np.float64] | None) -> int:
    """The drawn token: argmax(scores + noise), or argmax(scores) without noise; ties lowest id."""
    return int(np.argmax(scores_V if noise_V is None else scores_V + noise_V))


def draw(
    logits_V: NDArray[np.float32],
    sampling: Sampling,
    noise: Noise | None,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    names_V: NDArray[np.int64] | None = None,
) -> int:
    """The index of `choose(process(logits_V, ...), noise)`, bit for bit.

    `noise` is a row of noise over the target's ids, None at temperature 0. `names_V` says which of
    those ids each entry of `logits_V` is, ascending; None: entry i is id i. Raises what `process`
    raises.
    """
    if isinstance(noise, GumbelRow):
        kept_M, scores_M = _candidates(logits_V, sampling, noise, names_V, prompt_ids, output_ids)
        noise_M = noise.at(kept_M if names_V is None else names_V[kept_M])
        return int(kept_M[choose(scores_M, noise_M)])
    scores_V = process(logits_V, sampling, prompt_ids=prompt_ids, output_ids=output_ids)
    return choose(scores_V, noise if noise is None or names_V is None else noise[names_V])


def _candidates(
    logits_V: NDArray[np.float32],
    sampling: Sampling,
    noise: GumbelRow,
    names_V: NDArray[np.int64] | None,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The entries that can win, ascending, and their processed scores."""
    if sampling.greedy or not sampling.keeps_all:
        kept_M, scores_M = support(logits_V, sampling, prompt_ids=prompt_ids, output_ids=output_ids)
        return (np.arange(len(scores_M)) if kept_M is None else kept_M), scores_M
    raw_V = penalised(logits_V, sampling, prompt_ids=prompt_ids, output_ids=output_ids)
    best = finite_max(raw_V)
    top = int(raw_V.argmax())
    name = top if names_V is None else int(names_V[top])
    # The best entry scores 0 plus its own noise, and no other gains more than the highest noise.
    reach = noise.highest() - float(noise.at(np.array([name]))[0]) + _SLACK
    with np.errstate(over="ignore"):
        bound = np.nextafter(np.float32(best - sampling.temperature * reach), np.float32(-np.inf))
    kept_M = np.flatnonzero(raw_V >= bound)
    return kept_M, tempered(raw_V[kept_M], best, sampling)
