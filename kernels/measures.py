"""The measures of speculative decoding, one definition each, used everywhere.

T: output positions; K: entries of a stored distribution.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")


def acceptance_rate(accepted: int, tested: int) -> float:
    """Accepted over tested drafts; NaN where none was tested.

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


def replay_acceptance(
    agree_T: NDArray[np.bool_], proposed_T: NDArray[np.bool_] | None = None
) -> float:
    """Mean of `agree_T` over the positions with a proposal (default all); NaN without any."""
    picked = agree_T if proposed_T is None else agree_T[proposed_T]
    return _ratio(float(np.count_nonzero(picked)), len(picked))


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk:
    """Counts of one or more outputs under fixed lookahead. Walks add up with `+`."""

    steps: int = 0
    tested: int = 0
    accepted: int = 0
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
    def accepted_per_step(self) -> float:
        """The accepted length: accepted drafts a step, correction and bonus not counted."""
        return _ratio(self.accepted, self.steps)

    @property
    def tokens_per_step(self) -> float:
        """Emitted tokens a step, correction and bonus counted."""
        return _ratio(self.tokens, self.steps)


def walk(agree_T: NDArray[np.bool_], lookahead: int, *, budget: int | None = None) -> Walk:
    """What the engine would count over one output at a fixed lookahead.

    agree_T[t] is True where the drafter, given the true prefix, proposes the output's token t. A
    step at position t drafts min(lookahead, budget - t - 1) tokens, accepts while they agree and
    emits one token more, but nothing after the last position.

    `budget` is the request's max_tokens, by default len(agree_T): right where the output ended by
    length. Where it ended by EOS earlier, pass max_tokens (or anything large if unknown), because
    the engine then drafts, and tests, the ending token too.
    """
    total = len(agree_T)
    budget = total if budget is None else budget
    if budget < total or lookahead < 0:
        raise ValueError(f"budget {budget} below {total} tokens, or lookahead {lookahead} below 0")
    steps = tested = accepted = at = 0
    while at < total:
        drafts_G = agree_T[at : at + min(lookahead, budget - at - 1)]
        run = len(drafts_G) if drafts_G.all() else int(np.argmin(drafts_G))
        steps += 1
        accepted += run
        tested += min(run + 1, len(drafts_G))
        at = min(at + run + 1, total)
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
