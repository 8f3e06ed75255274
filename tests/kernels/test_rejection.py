"""The ratio test: decisions by hand, and properties of every step."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftkeep.errors import ModelError
from draftkeep.kernels.noise import ACCEPT, RECOVERY, gumbel, uniform
from draftkeep.kernels.outcome import Verified
from draftkeep.kernels.processors import log_softmax64, process
from draftkeep.kernels.rejection import verify_rejection
from draftkeep.kernels.sampling import Sampling

_VOCAB = 6
_P = np.array([0.4, 0.3, 0.2, 0.1])
_LOGITS = np.log(_P).astype(np.float32)


def _step(
    drafts: list[int],
    laws: list[NDArray[np.float64] | None],
    *,
    u: float = 0.5,
    noise: Callable[[int], NDArray[np.float64]] = lambda index: np.zeros(4),
    output: tuple[int, ...] = (),
    **values: Any,
) -> Verified:
    return verify_rejection(
        np.stack([_LOGITS] * (len(drafts) + 1)),
        drafts,
        laws,
        Sampling(**values),
        prompt_ids=[0],
        output_ids=output,
        uniform=lambda index: u,
        noise=noise,
    )


def _log(*q: float) -> NDArray[np.float64]:
    with np.errstate(divide="ignore"):
        logs: NDArray[np.float64] = np.log(np.array(q))
        return logs


@pytest.mark.parametrize(("u", "accepted"), [(0.49, 1), (0.51, 0)])
def test_a_draft_is_kept_with_probability_p_over_q(u: float, accepted: int) -> None:
    # p(1) = 0.3 and q(1) = 0.6.
    assert _step([1], [_log(0.2, 0.6, 0.1, 0.1)], u=u).accepted == accepted


@pytest.mark.parametrize(("u", "accepted"), [(0.29, 1), (0.31, 0)])
def test_a_certain_draft_is_kept_with_probability_p(u: float, accepted: int) -> None:
    assert _step([1], [None], u=u).accepted == accepted


def test_a_draft_more_likely_under_the_target_is_always_kept() -> None:
    assert _step([1], [_log(0.7, 0.3, 0.0, 0.0)], u=np.nextafter(1.0, 0.0)).accepted == 1


def test_an_impossible_draft_is_never_kept_even_by_a_zero() -> None:
    done = _step([3], [_log(0.0, 0.0, 0.0, 1.0)], u=0.0, top_k=2)
    assert done.accepted == 0
    assert done.tokens[0] in (0, 1)


def test_the_recovery_is_drawn_from_the_residual() -> None:
    # max(p - q, 0) leaves ids 2 and 3, in the ratio 1 to 4: the noise may lift id 0, never id 2.
    law = _log(0.5, 0.4, 0.15, 0.0)
    lifted = np.array([50.0, 50.0, 0.0, 0.0])
    expected = np.log(np.array([0.05, 0.1]))
    for gap, token in ((0.0, 3), (expected[1] - expected[0] + 0.01, 2)):
        noise = lifted + np.array([0.0, 0.0, gap, 0.0])
        done = _step([1], [law], u=0.99, noise=lambda index, noise=noise: noise)  # type: ignore[misc]
        assert done.tokens == (token,)
        assert done.logprobs == pytest.approx([np.log(_P[token])], abs=1e-6)


def test_a_certain_draft_leaves_everything_else() -> None:
    lifted = np.array([50.0, 0.0, 0.0, 0.0])
    assert _step([0], [None], u=0.99, noise=lambda index: lifted).tokens == (1,)


def test_an_empty_residual_falls_back_to_the_target() -> None:
    law = log_softmax64(process(_LOGITS, Sampling(), prompt_ids=[], output_ids=[]))
    # Equal laws always keep the draft; only rounding could refuse it, here a law just below 1.
    done = _step([2], [law + 1e-9], u=np.nextafter(1.0, 0.0))
    assert done == Verified(tokens=(0,), accepted=0, tested=1, logprobs=done.logprobs)


def test_all_kept_gives_a_token_of_the_target() -> None:
    law = _log(0.4, 0.3, 0.2, 0.1)
    done = _step([1, 2], [law, law], u=0.1)
    assert (done.tokens, done.accepted, done.tested) == ((1, 2, 0), 2, 2)
    assert done.logprobs == pytest.approx(np.log([0.3, 0.2, 0.4]), abs=1e-6)


def test_no_drafts_is_plain_decoding() -> None:
    done = _step([], [])
    assert (done.tokens, done.accepted, done.tested) == ((0,), 0, 0)


@pytest.mark.parametrize("draft", [3, 1])
def test_nothing_follows_an_ending_token(draft: int) -> None:
    # Draft 3 ends and is kept; draft 1 is refused and its place taken by the ending token.
    lifted = np.array([0.0, 0.0, 0.0, 50.0])
    done = _step(
        [draft, 2],
        [None, None],
        u=0.0 if draft == 3 else 0.99,
        eos_ids=(3,),
        noise=lambda index: lifted,
    )
    assert (done.tokens, done.tested) == ((3,), 1)
    assert done.accepted == (draft == 3)


def test_penalties_see_the_drafts_before() -> None:
    # After an accepted 0 its penalty makes a second 0 impossible in all but name.
    done = _step([0, 0], [None, None], u=0.01, presence_penalty=50.0)
    assert (done.tokens, done.accepted, done.tested) == ((0, 1), 1, 2)


def test_min_tokens_counts_the_drafts_before() -> None:
    done = _step([1, 3], [None, None], u=0.01, eos_ids=(3,), min_tokens=2)
    assert (done.tokens, done.accepted) == ((1, 0), 1)


def test_each_position_has_its_own_noise() -> None:
    asked: list[tuple[str, int]] = []

    def coin(index: int) -> float:
        asked.append(("test", index))
        return 0.1

    def noise(index: int) -> NDArray[np.float64]:
        asked.append(("recovery", index))
        return np.zeros(4)

    verify_rejection(
        np.stack([_LOGITS] * 3), [1, 3], [None, _log(0.0, 0.0, 0.0, 1.0)], Sampling(top_k=3),
        prompt_ids=[], output_ids=[7, 7], uniform=coin, noise=noise,
    )  # fmt: skip
    assert asked == [("test", 2), ("test", 3), ("recovery", 3)]


def _never(index: int) -> Any:
    raise AssertionError(f"noise {index} is not needed")


def test_temperature_zero_compares_with_the_argmax() -> None:
    done = verify_rejection(
        np.stack([_LOGITS] * 3), [0, 1], [None, None], Sampling(temperature=0.0),
        prompt_ids=[], output_ids=[], uniform=_never, noise=_never,
    )  # fmt: skip
    assert done == Verified(tokens=(0, 0), accepted=1, tested=2, logprobs=(0.0, 0.0))


def test_a_padded_draft_is_refused() -> None:
    done = _step([-1], [None], u=0.0)
    assert (done.tokens, done.accepted, done.tested) == ((0,), 0, 1)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="as many laws"):
        _step([1], [])
    with pytest.raises(ModelError, match="expected"):
        verify_rejection(
            np.full((1, 4), np.nan, np.float32), [], [], Sampling(),
            prompt_ids=[], output_ids=[], uniform=_never, noise=_never,
        )  # fmt: skip


_SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.5, 1.3]),
    top_p=st.sampled_from([1.0, 0.8]),
    top_k=st.sampled_from([0, 3]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 1.4]),
    frequency_penalty=st.sampled_from([0.0, 0.6]),
    logit_bias=st.sampled_from([(), ((2, -100.0),)]),
    eos_ids=st.just((3,)),
    ignore_eos=st.booleans(),
    min_tokens=st.sampled_from([0, 3]),
)


@given(sampling=_SAMPLINGS, seed=st.integers(0, 999), data=st.data())
@settings(max_examples=200, deadline=None)
def test_a_step_is_repeatable_and_true_to_its_drafts(
    sampling: Sampling, seed: int, data: st.DataObject
) -> None:
    rng = np.random.default_rng(seed)
    drafts = data.draw(st.lists(st.integers(0, _VOCAB - 1), max_size=4))
    logits_WV = rng.standard_normal((len(drafts) + 1, _VOCAB)).astype(np.float32) * 2
    laws = [
        None if certain else log_softmax64(rng.standard_normal(_VOCAB))
        for certain in data.draw(
            st.lists(st.booleans(), min_size=len(drafts), max_size=len(drafts))
        )
    ]

    def step() -> Verified:
        return verify_rejection(
            logits_WV, drafts, laws, sampling,
            prompt_ids=[1, 2],
            output_ids=[4],
            uniform=lambda index: uniform(seed, 0, index, ACCEPT),
            noise=lambda index: gumbel(seed, 0, index, _VOCAB, RECOVERY),
        )  # fmt: skip

    done = step()
    assert done == step()
    assert list(done.tokens[: done.accepted]) == drafts[: done.accepted]
    assert done.tested - done.accepted in (0, 1)
    assert done.logprobs is not None
    for at, (token, logprob) in enumerate(zip(done.tokens, done.logprobs, strict=True)):
        scores = process(
            logits_WV[at], sampling, prompt_ids=[1, 2], output_ids=[4, *done.tokens[:at]]
        )
        expected = 0.0 if sampling.greedy else log_softmax64(scores)[token]
        assert logprob == pytest.approx(expected)
        assert np.isfinite(scores[token])
