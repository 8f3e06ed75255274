"""The rejection rule: a draft drawn from q is kept with probability min(1, p/q).

Where it is not kept, its place is drawn from norm(max(p - q, 0)); together the two give exactly p
for every q (Leviathan et al., 2023; Chen et al., 2023). Draft, test and recovery each have noise
of their own. What comes out depends on the drafter, though its law does not.

V: vocabulary of the target; W: rows of one verification, drafts + 1.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from draftkeep.kernels.coupled import verify_coupled
from draftkeep.kernels.draw import choose
from draftkeep.kernels.outcome import Verified, is_end
from draftkeep.kernels.processors import log_softmax64, process
from draftkeep.kernels.sampling import Sampling

# The log q over V of a draft's own processed distribution, -inf where q is 0.
Law = NDArray[np.float64]


def verify_rejection(
    logits_WV: NDArray[np.float32],
    drafts: Sequence[int],
    laws: Sequence[Law | None],
    sampling: Sampling,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    uniform: Callable[[int], float],
    noise: Callable[[int], NDArray[np.float64]],
) -> Verified:
    """Accepts drafts by the ratio test; the law of the tokens is the target's for every drafter.

    Row i of `logits_WV` holds the target's logits after prompt, output and drafts[:i]; there is
    one row more than drafts. laws[i] is what drafts[i] was drawn from, None where the drafter was
    certain of it. p and q are processed distributions: penalties at row i see the drafts before
    it. A draft is kept where u < p/q, strictly, so that an impossible token never is. The first
    that is not kept is replaced by a draw from the residual, or from p where the residual is
    empty, and ends the step; a token of p itself follows where all were kept. Nothing follows an
    ending token.

    `uniform(n)` and `noise(n)` belong to absolute output index n, here len(output_ids) + i: the
    number u of the test and the Gumbel row of the recovery or the token of p. They and the noise
    behind each draft must be independent of one another.

    `logprobs` holds log p of every emitted token. At temperature 0 the rule is equality with the
    argmax, p is certain, and neither noise is asked for. Raises ModelError for NaN logits and
    ValueError where rows or laws do not fit the drafts.
    """
    if len(laws) != len(drafts) or len(logits_WV) != len(drafts) + 1:
        raise ValueError(
            f"{len(drafts)} drafts need as many laws and one logit row more, got {len(laws)} and "
            f"{len(logits_WV)}"
        )
    histories = {"prompt_ids": prompt_ids, "output_ids": output_ids}
    if sampling.greedy:
        return verify_coupled(logits_WV, drafts, sampling, **histories, noise=noise).certain()
    tokens: list[int] = []
    logprobs: list[float] = []
    for row, logits_V in enumerate(logits_WV):
        history = [*output_ids, *tokens] if tokens else output_ids
        p_V = log_softmax64(process(logits_V, sampling, prompt_ids=prompt_ids, output_ids=history))
        drafted = row < len(drafts)
        kept = drafted and uniform(len(history)) < _ratio(p_V, drafts[row], laws[row])
        if kept:
            token = drafts[row]
        else:
            rest_V = _residual(p_V, drafts[row], laws[row]) if drafted else p_V
            token = choose(rest_V, noise(len(history)))
        tokens.append(token)
        logprobs.append(float(p_V[token]))
        if not kept or is_end(token, sampling):
            break
    accepted = len(tokens) if kept else len(tokens) - 1
    return Verified(
        tokens=tuple(tokens),
        accepted=accepted,
        tested=min(len(tokens), len(drafts)),
        logprobs=tuple(logprobs),
    )


def _ratio(p_V: Law, draft: int, q_V: Law | None) -> float:
    """p/q of the draft, at most 1; 0 for a draft that is no id."""
    if not 0 <= draft < len(p_V):
        return 0.0
    log_q = 0.0 if q_V is None else float(q_V[draft])
    return math.exp(min(float(p_V[draft]) - log_q, 0.0))


def _residual(p_V: Law, draft: int, q_V: Law | None) -> Law:
    """log max(p - q, 0), up to a constant; log p where nothing is left of it."""
    if q_V is None:
        rest_V = p_V.copy()
        if 0 <= draft < len(p_V):
            rest_V[draft] = -np.inf
    else:
        with np.errstate(divide="ignore"):
            rest_V = np.log(np.maximum(np.exp(p_V) - np.exp(q_V), 0.0))
    return rest_V if rest_V.max() > -np.inf else p_V
