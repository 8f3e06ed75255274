"""The measures, by hand and against the verification they count."""

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftkeep.kernels.coupled import verify_coupled
from draftkeep.kernels.measures import (
    Walk,
    acceptance_rate,
    estimated_speed_up,
    expected_acceptance,
    ratio_acceptance,
    replay_acceptance,
    speed_up,
    walk,
)
from draftkeep.kernels.sampling import Sampling


def _bits(text: str) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return np.array([letter == "1" for letter in text])


def test_runs_of_3_2_1_0_emit_two_and_a_half_tokens_a_step() -> None:
    # 111 and its bonus, 11 and its correction, 1 and its correction, then no room for a draft.
    done = walk(_bits("1110110100"), 3)
    assert done == Walk(steps=4, tested=3 + 3 + 2 + 0, accepted=6, tokens=10)
    assert done.tokens_per_step == 2.5
    assert done.acceptance_rate == 6 / 8


def test_a_run_of_0_with_room_tests_one_draft() -> None:
    done = walk(_bits("1110110100"), 3, budget=100)
    assert done == Walk(steps=4, tested=3 + 3 + 2 + 1, accepted=6, tokens=10)


def test_bonus_position_is_not_tested() -> None:
    assert walk(_bits("110110"), 2) == Walk(steps=2, tested=4, accepted=4, tokens=6)


def test_lookahead_is_capped_by_the_budget() -> None:
    # Position 3 is the last: two drafts and a bonus follow position 1, not three drafts.
    assert walk(_bits("0111"), 3) == Walk(steps=2, tested=3, accepted=2, tokens=4)


def test_an_output_ended_by_eos_tests_the_eos() -> None:
    assert walk(_bits("0111"), 3, budget=50) == Walk(steps=2, tested=4, accepted=3, tokens=4)


def test_rejection_at_the_final_eos() -> None:
    assert walk(_bits("10"), 4, budget=50) == Walk(steps=1, tested=2, accepted=1, tokens=2)


def test_lookahead_0_is_plain_decoding() -> None:
    assert walk(_bits("111"), 0) == Walk(steps=3, tested=0, accepted=0, tokens=3)


def test_no_positions() -> None:
    done = walk(_bits(""), 4)
    assert done == Walk()
    assert math.isnan(done.acceptance_rate)
    assert math.isnan(done.tokens_per_step)


def test_walks_add_up() -> None:
    left = Walk(steps=1, tested=2, accepted=1, tokens=2)
    assert left + left == Walk(steps=2, tested=4, accepted=2, tokens=4)


@pytest.mark.parametrize(("lookahead", "budget"), [(-1, 3), (2, 2)])
def test_impossible_walks_are_refused(lookahead: int, budget: int) -> None:
    with pytest.raises(ValueError, match="below"):
        walk(_bits("111"), lookahead, budget=budget)


@given(
    agree=st.lists(st.booleans(), min_size=1, max_size=30),
    lookahead=st.integers(0, 6),
    spare=st.integers(0, 8),
)
@settings(deadline=None)
def test_walk_equals_a_run_of_the_verification(
    agree: list[bool], lookahead: int, spare: int
) -> None:
    # A greedy target that says 1, then EOS (2) at the end; wrong drafts are 0.
    total, budget = len(agree), len(agree) + spare
    truth = [1] * (total - 1) + [2]
    rows = np.zeros((budget + 1, 3), dtype=np.float32)
    rows[np.arange(total), truth] = 1.0
    rows[total:, 1] = 1.0
    said = [token if right else 0 for token, right in zip(truth, agree, strict=True)]
    said += [1] * spare
    output: list[int] = []
    steps = tested = accepted = 0
    while len(output) < total:
        at = len(output)
        drafts = said[at : at + min(lookahead, budget - at - 1)]
        done = verify_coupled(
            rows[at : at + len(drafts) + 1],
            drafts,
            Sampling(temperature=0.0, eos_ids=(2,)),
            prompt_ids=[],
            output_ids=output,
            noise=lambda index: np.zeros(3),
        )
        output.extend(done.tokens)
        steps, tested, accepted = steps + 1, tested + done.tested, accepted + done.accepted
    expected = Walk(steps=steps, tested=tested, accepted=accepted, tokens=len(output))
    assert walk(np.array(agree), lookahead, budget=budget) == expected


def _sum(walks: list[tuple[float, Walk]], count: str) -> float:
    return math.fsum(share * getattr(done, count) for share, done in walks)


@given(
    chances=st.lists(
        st.sampled_from([0.0, 0.25, 1 / 3, 0.9, 1.0]) | st.floats(0, 1), min_size=1, max_size=8
    ),
    lookahead=st.integers(0, 5),
    spare=st.integers(0, 6),
)
@settings(deadline=None, max_examples=60)
def test_a_walk_of_chances_is_the_mean_over_every_outcome(
    chances: list[float], lookahead: int, spare: int
) -> None:
    budget = len(chances) + spare
    every = [
        (
            math.prod(a if bit else 1 - a for a, bit in zip(chances, bits, strict=True)),
            walk(np.array(bits), lookahead, budget=budget),
        )
        for bits in product([False, True], repeat=len(chances))
    ]
    done = walk(np.array(chances), lookahead, budget=budget)
    assert done.tokens == len(chances)
    for count in ("steps", "tested", "accepted"):
        assert getattr(done, count) == pytest.approx(_sum(every, count), rel=1e-12, abs=1e-12)
    assert done.accepted <= done.tested


def test_a_walk_of_chances_by_hand() -> None:
    # From 0: both accepted (0.1), the first alone (0.4), none (0.5), each with one token more; a
    # step then starts at 1 (0.5) and drafts the last, or at 2 (0.4) and drafts nothing.
    done = walk(np.array([0.5, 0.2, 0.7]), 2)
    assert done.steps == pytest.approx(1 + 0.5 + 0.4 + 0.5 * 0.8)
    assert done.tested == pytest.approx(1 + 0.5 + 0.5)
    assert done.accepted == pytest.approx(0.5 + 0.1 + 0.5 * 0.2)


@pytest.mark.parametrize("chance", [-0.1, 1.1, math.nan])
def test_a_walk_refuses_what_is_no_chance(chance: float) -> None:
    with pytest.raises(ValueError, match="within 0 and 1"):
        walk(np.array([0.5, chance]), 2)


def test_ratio_acceptance_by_hand() -> None:
    assert ratio_acceptance(math.log(0.1), math.log(0.4)) == pytest.approx(0.25)
    assert ratio_acceptance(math.log(0.4), math.log(0.1)) == 1.0
    assert ratio_acceptance(-math.inf, math.log(0.4)) == 0.0
    # A probability below the least that a trace can hold.
    assert ratio_acceptance(-50.0, -math.inf) == 1.0
    assert ratio_acceptance(-math.inf, -math.inf) == 0.0


@given(
    weights=st.lists(st.tuples(st.floats(0.01, 1), st.floats(0, 1)), min_size=2, max_size=6).filter(
        lambda pairs: sum(q for _, q in pairs) > 0.1
    )
)
@settings(deadline=None)
def test_ratio_acceptance_averages_to_the_shared_mass(weights: list[tuple[float, float]]) -> None:
    p, q = (np.array(column) / sum(column) for column in zip(*weights, strict=True))
    with np.errstate(divide="ignore"):
        log_q = np.log(q)
    mean = sum(p[x] * ratio_acceptance(log_q[x], math.log(p[x])) for x in range(len(p)))
    assert mean == pytest.approx(np.minimum(p, q).sum())


def test_acceptance_rate() -> None:
    assert acceptance_rate(3, 4) == 0.75
    assert math.isnan(acceptance_rate(0, 0))
    with pytest.raises(ValueError, match="accepted <= tested"):
        acceptance_rate(5, 4)


def test_expected_acceptance_is_the_shared_mass() -> None:
    p = np.array([[0.5, 0.25, 0.0], [0.9, 0.05, 0.05]])
    q = np.array([[0.25, 0.5, 0.25], [0.1, 0.6, 0.0]])
    assert expected_acceptance(p, q) == pytest.approx((0.5 + 0.15) / 2)
    assert expected_acceptance(p, p) == pytest.approx((0.75 + 1.0) / 2)
    assert math.isnan(expected_acceptance(p[:0], q[:0]))


def test_expected_acceptance_refuses_logarithms_and_other_shapes() -> None:
    p = np.array([[0.5, 0.5]])
    with pytest.raises(ValueError, match="logarithms"):
        expected_acceptance(p, np.log(p))
    with pytest.raises(ValueError, match="shapes"):
        expected_acceptance(p, p[:, :1])


def test_replay_acceptance_counts_proposals_alone() -> None:
    assert replay_acceptance(_bits("1100")) == 0.5
    assert replay_acceptance(_bits("1100"), _bits("1110")) == pytest.approx(2 / 3)
    assert replay_acceptance(np.array([0.5, 0.25, 0.0]), _bits("110")) == 0.375
    assert math.isnan(replay_acceptance(_bits("11"), _bits("00")))


def test_speed_ups() -> None:
    assert speed_up(30.0, 20.0) == 1.5
    assert math.isnan(speed_up(30.0, 0.0))
    assert estimated_speed_up(2.4, 4, 0.05) == pytest.approx(2.0)
