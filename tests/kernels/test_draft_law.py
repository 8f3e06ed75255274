"""Draft and token have the joint law of the rejection rule, and shared noise is caught by it.

The output's law alone can look right where two draws share their noise. The joint law of what was
drafted and what was emitted cannot: q(d) min(1, p(d)/q(d)) for a draft that is kept, and
q(d) (1 - min(1, p(d)/q(d))) times the residual's share for one that is replaced. Seeds are fixed.
"""

from collections import Counter

import numpy as np
import pytest
from scipy import stats

from draftkeep.kernels.draw import choose
from draftkeep.kernels.noise import ACCEPT, COUPLED, DRAFT, RECOVERY, gumbel, uniform
from draftkeep.kernels.rejection import verify_rejection
from draftkeep.kernels.sampling import Sampling

SEEDS, RIGHT, BROKEN = 4000, 1e-3, 1e-6
# Id 2 is drafted most and mostly refused; 0 and 1 then take its place equally often, though the
# drafter likes 0 far more: an id that just lost as a draft keeps its low noise where it is shared.
# The test's number is the u of id 0, so that it must not be the noise of id 0 either.
P_V = np.array([0.60, 0.26, 0.14])
Q_V = np.array([0.35, 0.01, 0.64])
LOGITS_2V = np.log(np.stack([P_V, P_V])).astype(np.float32)


def _p_value(draft: int, accept: int, recovery: int) -> float:
    """Of a chi-square test of (draft, token) where the three draws use these streams."""
    log_q_V, vocab = np.log(Q_V), len(Q_V)
    seen: Counter[tuple[int, int]] = Counter()
    for seed in range(SEEDS):
        drafted = choose(log_q_V, gumbel(seed, 0, 0, vocab, draft))
        done = verify_rejection(
            LOGITS_2V,
            [drafted],
            [log_q_V],
            Sampling(),
            prompt_ids=[0],
            output_ids=[],
            uniform=lambda index, seed=seed: uniform(seed, 0, index, accept),  # type: ignore[misc]
            noise=lambda index, seed=seed: gumbel(seed, 0, index, vocab, recovery),  # type: ignore[misc]
        )
        seen[drafted, done.tokens[0]] += 1
    kept_V = np.minimum(P_V, Q_V)
    residual_V = np.maximum(P_V - Q_V, 0.0) / np.maximum(P_V - Q_V, 0.0).sum()
    law_VV = np.diag(kept_V) + np.outer(Q_V - kept_V, residual_V)
    seen_VV = np.array([[seen[row, column] for column in range(vocab)] for row in range(vocab)])
    possible = law_VV > 0
    assert seen_VV[~possible].sum() == 0
    return float(stats.chisquare(seen_VV[possible], SEEDS * law_VV[possible]).pvalue)


def test_draft_and_token_have_their_joint_law() -> None:
    assert _p_value(DRAFT, ACCEPT, RECOVERY) > RIGHT


@pytest.mark.parametrize(
    "streams",
    [
        pytest.param((DRAFT, ACCEPT, DRAFT), id="the draft's noise recovers"),
        pytest.param((DRAFT, DRAFT, RECOVERY), id="the draft's noise tests"),
        pytest.param((DRAFT, ACCEPT, ACCEPT), id="the test's noise recovers"),
        pytest.param((COUPLED, COUPLED, COUPLED), id="one noise for all"),
    ],
)
def test_noise_that_serves_twice_fails_the_same_test(streams: tuple[int, int, int]) -> None:
    assert _p_value(*streams) < BROKEN
