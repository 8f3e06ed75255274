"""The measures of speculative decoding, as jobs, replay and the gate use them.

T: output positions; K: entries of a stored distribution.
"""

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import mul

import numpy as np
from numpy.typing import NDArray

# The chance, position by position, that a draft there is accepted; True and False are 1 and 0.
Accept = NDArray[np.bool_] | NDArray[np.float64]


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def acceptance_rate(accepted: float, tested: float) -> float:
    """Accepted over tested drafts, counted or expected; NaN where none was tested.

    A draft after the first rejection of its step, or after an ending token, was not tested.
    """
    if not 0 <= accepted <= tested:
        raise ValueError(f"expected 0 <= accepted <= tested, got {accepted} and {tested}")
    return _ratio(accepted, tested)


def expected_acceptance(p_TK: NDArray[np.floating], q_TK: NDArray[np.floating]) -> float:
    """Mean over positions of sum min(p, q) over the stored entries; NaN without positions.

    p and q are processed probabilities (not logarithms) of the same ids, 0 where a row is padded.
    The tail is never counted, so this is a lower bound of 1 - TV(p, q), the chance that the
    ratio test accepts (Leviathan et al., 2023).
    """
    if p_TK.shape != q_TK.shape or p_TK.ndim != 2:
        raise ValueError(f"expected two equal [T, K] shapes, got {p_TK.shape} and {q_TK.shape}")
    if min(p_TK.min(initial=0.0), q_TK.min(initial=0.0)) < 0.0:
        raise ValueError("expected probabilities, got values below 0 (logarithms?)")
    return _ratio(float(np.minimum(p_TK, q_TK).sum(dtype=np.float64)), len(p_TK))


def ratio_acceptance(log_q: float, log_p: float) -> float:
    """The chance that the ratio test accepted a draft where it emitted this token: min(1, q/p).

    log_p and log_q are the target's and the drafter's processed log-probabilities of the token
    that was emitted, minus infinity for none; 0 where q is 0.

    A draft x comes with probability q(x) and is kept with min(1, p(x)/q(x)), so x is emitted as an
    accepted draft with probability min(p(x), q(x)), and emitted at all with p(x), whatever the
    drafter (Leviathan et al., 2023; Chen et al., 2023). The quotient is the chance of acceptance
    given the token. Over tokens drawn from p its mean is sum min(p, q), the chance that a draft is
    accepted: one token is an unbiased estimate of it, and may come from a service with another
    drafter or none. Given a whole output, the tests at its positions are independent of one
    another, so `walk` may multiply.
    """
    return 0.0 if log_q == -math.inf else math.exp(min(log_q - log_p, 0.0))


def replay_acceptance(accept_T: Accept, proposed_T: NDArray[np.bool_] | None = None) -> float:
    """Mean of `accept_T` over the positions with a proposal (default all); NaN without any."""
    picked = accept_T if proposed_T is None else accept_T[proposed_T]
    return _ratio(float(picked.sum(dtype=np.float64)), len(picked))


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Counts of one or more outputs under fixed lookahead, or their expectations.

    Walks add up with `+`.
    """

    steps: float = 0
    tested: float = 0
    accepted: float = 0
    tokens: int = 0

    def __add__(self, other: "Walk") -> "Walk":
        return Walk(
            steps=self.steps + other.steps,
            tested=self.tested + other.tested,
            accepted=self.accepted + other.accepted,
            tokens=self.tokens + other.tokens,
        )

    @property
    def acceptance_rate(self) -> float:
        """Accepted over tested drafts."""
        return acceptance_rate(self.accepted, self.tested)

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens a step, correction and bonus counted."""
        return _ratio(self.tokens, self.steps)


def walk(accept_T: Accept, lookahead: int, *, budget: int | None = None) -> Walk:
    """What the engine would count over one output at a fixed lookahead, on average.

    accept_T[t] is the chance that a draft of the output's token t, made after the true prefix, is
    accepted, independently of the others. A step at position t drafts
    min(lookahead, budget - t - 1) tokens, accepts up to the first that fails and emits one token
    more, but nothing after the last position. The expectation is exact, over every place at which
    a step can start; where all chances are 0 or 1 there is one walk, and these are its counts.

    `budget` is the request's max_tokens, by default len(accept_T): right where the output ended by
    length. Where it ended by EOS earlier, pass max_tokens (or anything large if unknown), because
    the engine then drafts, and tests, the ending token too.
    """
    total = len(accept_T)
    budget = total if budget is None else budget
    if budget < total or lookahead < 0:
        raise ValueError(f"budget {budget} below {total} tokens, or lookahead {lookahead} below 0")
    chances = accept_T.astype(np.float64).tolist()
    if not all(0.0 <= chance <= 1.0 for chance in chances):
        raise ValueError("expected chances within 0 and 1")
    steps = tested = accepted = 0.0
    begins = [1.0, *[0.0] * total]
    for at in range(total):
        share = begins[at]
        if share == 0.0:
            continue
        drafts = chances[at : at + min(lookahead, budget - at - 1)]
        # reach[n]: the chance that the first n drafts are all accepted.
        reach = list(accumulate(drafts, mul, initial=1.0))
        steps += share
        # Rounded once and in this order, accepted cannot come out above tested.
        tested += share * math.fsum(reach[:-1])
        accepted += share * math.fsum(reach[1:])
        for run, (before, after) in enumerate(pairwise(reach)):
            begins[at + run + 1] += share * (before - after)
        begins[min(at + len(reach), total)] += share * reach[-1]
    return Walk(steps=steps, tested=tested, accepted=accepted, tokens=total)


def speed_up(tokens_per_s: float, target_alone_tokens_per_s: float) -> float:
    """Tokens a second over those of the target alone, both from the same process and run."""
    return _ratio(tokens_per_s, target_alone_tokens_per_s)


def estimated_speed_up(tokens_per_step: float, lookahead: int, drafter_cost: float) -> float:
    """The speed-up that counts promise: tokens_per_step / (1 + lookahead * drafter_cost).

    `drafter_cost` is one drafter pass over one target pass. Assumes that verifying lookahead + 1
    tokens costs as much as one (Leviathan et al., 2023), so it is an upper bound.
    """
    return tokens_per_step / (1.0 + lookahead * drafter_cost)
