"""The coupled rule: exact for any drafter, position by position."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftkeep.errors import ModelError
from draftkeep.kernels.coupled import verify_coupled
from draftkeep.kernels.draw import choose
from draftkeep.kernels.noise import gumbel
from draftkeep.kernels.outcome import Verified, is_end
from draftkeep.kernels.processors import process
from draftkeep.kernels.sampling import Sampling

_VOCAB = 12
_TABLE = np.random.default_rng(0).standard_normal((_VOCAB, _VOCAB)).astype(np.float32) * 2


def _logits(last: int) -> NDArray[np.float32]:
    """A toy target: the next token's logits depend on the last token."""
    return np.asarray(_TABLE[last])


def _alone(sampling: Sampling, prompt: list[int], count: int, seed: int) -> list[int]:
    output: list[int] = []
    while len(output) < count:
        last = [*prompt, *output][-1]
        scores = process(_logits(last), sampling, prompt_ids=prompt, output_ids=output)
        noise = None if sampling.greedy else gumbel(seed, 0, len(output), _VOCAB)
        output.append(choose(scores, noise))
        if is_end(output[-1], sampling):
            break
    return output


def _step(
    sampling: Sampling, prompt: list[int], output: list[int], drafts: list[int], seed: int
) -> Verified:
    lasts = [[*prompt, *output][-1], *drafts]
    return verify_coupled(
        np.stack([_logits(last) for last in lasts]),
        drafts,
        sampling,
        prompt_ids=prompt,
        output_ids=output,
        noise=lambda index: gumbel(seed, 0, index, _VOCAB),
    )


_SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.3]),
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([0, 4]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    frequency_penalty=st.sampled_from([0.0, 0.6]),
    eos_ids=st.just((3,)),
    ignore_eos=st.booleans(),
    min_tokens=st.sampled_from([0, 5]),
)


@given(sampling=_SAMPLINGS, seed=st.integers(0, 999), data=st.data())
@settings(max_examples=150, deadline=None)
def test_output_does_not_depend_on_the_drafts(
    sampling: Sampling, seed: int, data: st.DataObject
) -> None:
    expected = _alone(sampling, [1, 2], 12, seed)
    output: list[int] = []
    while len(output) < len(expected):
        # Right drafts for a while, then anything.
        good = data.draw(st.integers(0, 4))
        rest = data.draw(st.lists(st.integers(0, _VOCAB - 1), max_size=3))
        drafts = [*expected[len(output) : len(output) + good], *rest]
        done = _step(sampling, [1, 2], output, drafts, seed)
        assert done.tested - done.accepted in (0, 1)
        assert list(done.tokens[: done.accepted]) == drafts[: done.accepted]
        output.extend(done.tokens)
    assert output[: len(expected)] == expected


def _greedy_rows(*tokens: int) -> NDArray[np.float32]:
    rows = np.zeros((len(tokens), _VOCAB), dtype=np.float32)
    rows[np.arange(len(tokens)), tokens] = 1.0
    return rows


def _no_noise(index: int) -> NDArray[np.float64]:
    raise AssertionError(f"noise {index} is not needed")


def _greedy(drafts: list[int], truth: list[int], **values: object) -> Verified:
    sampling = Sampling(temperature=0.0, **values)  # type: ignore[arg-type]
    return verify_coupled(
        _greedy_rows(*truth), drafts, sampling, prompt_ids=[0], output_ids=[], noise=_no_noise
    )


def test_all_accepted_gives_the_bonus() -> None:
    assert _greedy([4, 5], [4, 5, 6]) == Verified(tokens=(4, 5, 6), accepted=2, tested=2)


def test_first_rejection_is_corrected_and_ends_the_step() -> None:
    assert _greedy([4, 9, 6], [4, 5, 6, 7]) == Verified(tokens=(4, 5), accepted=1, tested=2)


def test_no_drafts_is_plain_decoding() -> None:
    assert _greedy([], [4]) == Verified(tokens=(4,), accepted=0, tested=0)


def test_accepted_eos_ends_without_bonus() -> None:
    done = _greedy([4, 3, 3], [4, 3, 5, 6], eos_ids=(3,))
    assert done == Verified(tokens=(4, 3), accepted=2, tested=2)


def test_corrected_eos_counts_its_draft_as_tested() -> None:
    done = _greedy([4, 9, 9], [4, 3, 5, 6], eos_ids=(3,))
    assert done == Verified(tokens=(4, 3), accepted=1, tested=2)


def test_ignored_eos_goes_on_and_a_stop_id_does_not() -> None:
    done = _greedy([3, 8, 1], [3, 8, 1, 2], eos_ids=(3,), ignore_eos=True, stop_ids=(8,))
    assert done == Verified(tokens=(3, 8), accepted=2, tested=2)


def test_padded_draft_is_rejected() -> None:
    assert _greedy([-1, -1], [4, 5, 6]) == Verified(tokens=(4,), accepted=0, tested=1)


def test_penalties_see_accepted_drafts() -> None:
    # Row 1 prefers token 4 again by 1.0; a frequency penalty of 1.5 for the accepted 4 forbids it.
    rows = _greedy_rows(4, 4, 4)
    rows[1, 7] = 0.5
    sampling = Sampling(temperature=0.0, frequency_penalty=1.5)
    done = verify_coupled(rows, [4, 4], sampling, prompt_ids=[], output_ids=[], noise=_no_noise)
    assert done == Verified(tokens=(4, 7), accepted=1, tested=2)


def test_min_tokens_counts_accepted_drafts() -> None:
    done = _greedy([0, 3], [0, 3, 3], eos_ids=(3,), min_tokens=2)
    assert done == Verified(tokens=(0, 0), accepted=1, tested=2)


def test_noise_is_asked_once_for_each_row_reached() -> None:
    asked: list[int] = []

    def noise(index: int) -> NDArray[np.float64]:
        asked.append(index)
        return np.zeros(_VOCAB)

    rows = _greedy_rows(4, 5, 6, 7)
    done = verify_coupled(
        rows, [4, 9, 6], Sampling(), prompt_ids=[], output_ids=[1, 1], noise=noise
    )
    assert done.tokens == (4, 5)
    assert asked == [2, 3]


def test_ties_go_to_the_lowest_id() -> None:
    assert choose(np.array([1.0, 2.0, 2.0]), None) == 1
    assert choose(np.array([1.0, 2.0, 2.0]), np.array([1.0, 0.0, 0.0])) == 0


def test_nan_logits_are_refused() -> None:
    rows = _greedy_rows(4)
    rows[0, 2] = np.nan
    for temperature in (0.0, 1.0):
        with pytest.raises(ModelError, match="expected"):
            verify_coupled(
                rows,
                [],
                Sampling(temperature=temperature),
                prompt_ids=[],
                output_ids=[],
                noise=lambda index: np.zeros(_VOCAB),
            )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_no_draft_reaches_may_hold_anything(temperature: float) -> None:
    """Without the draft nobody would have looked there."""
    rows = _greedy_rows(4, 5, 6) * 100
    rows[2] = np.nan
    done = verify_coupled(
        rows,
        [4, 9],
        Sampling(temperature=temperature),
        prompt_ids=[],
        output_ids=[],
        noise=lambda index: np.zeros(_VOCAB),
    )
    assert (done.tokens, done.accepted) == ((4, 5), 1)


def test_rows_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="one logit row more"):
        _greedy([4], [4])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_draws_follow_the_distribution(temperature: float) -> None:
    sampling = Sampling(temperature=temperature, top_p=0.9)
    scores = process(_logits(2), sampling, prompt_ids=[], output_ids=[])
    draws = 6000
    counts = np.zeros(_VOCAB)
    for seed in range(draws):
        counts[choose(scores, gumbel(seed, 0, 0, _VOCAB))] += 1
    expected = np.exp(scores - np.logaddexp.reduce(scores)) * draws
    inside = expected > 0
    assert counts[~inside].sum() == 0
    statistic = ((counts - expected)[inside] ** 2 / expected[inside]).sum()
    # The 0.9999 quantile of chi-square with 11 degrees of freedom; fixed seeds, so no flakes.
    assert statistic < 37.4
