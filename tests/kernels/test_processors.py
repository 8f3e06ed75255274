"""Processor version 1: hand-computed stages, and a slow plain chain as the second opinion."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftkeep.errors import InputError, ModelError
from draftkeep.kernels.processors import log_softmax64, process
from draftkeep.kernels.sampling import Sampling

_INF = float("inf")


def _run(
    logits: Sequence[float] | NDArray[np.float64],
    sampling: Sampling,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
) -> NDArray[np.float64]:
    row = np.array(logits, dtype=np.float32)
    before = row.copy()
    scores = process(row, sampling, prompt_ids=prompt, output_ids=output)
    assert np.array_equal(row, before, equal_nan=True)
    assert scores.dtype == np.float64
    return scores


def _kept(scores: NDArray[np.float64]) -> list[int]:
    return [int(index) for index in np.flatnonzero(scores > -np.inf)]


def _probabilities(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.exp(log_softmax64(scores))


def test_neutral_values_change_nothing() -> None:
    logits = [0.0, 1.0, -2.0]
    weights = np.exp(logits)
    assert _probabilities(_run(logits, Sampling())) == pytest.approx(weights / weights.sum())


def test_greedy_keeps_logits_after_bias_and_penalties() -> None:
    sampling = Sampling(temperature=0.0, logit_bias=((2, 4.0),), top_k=1, top_p=0.1)
    assert _run([1.0, 2.0, -1.0], sampling).tolist() == [1.0, 2.0, 3.0]


def test_temperature_divides() -> None:
    scores = _run([1.0, 3.0], Sampling(temperature=0.5))
    assert scores[1] - scores[0] == 4.0


def test_tiny_temperature_is_argmax_without_warning() -> None:
    assert _run([1.0, 3.0, 0.5], Sampling(temperature=1e-308)).tolist() == [-_INF, 0.0, -_INF]


def test_repetition_divides_positive_and_multiplies_the_rest() -> None:
    sampling = Sampling(temperature=0.0, repetition_penalty=2.0)
    scores = _run([4.0, -3.0, 4.0, 0.0], sampling, prompt=[0, 0, 1], output=[3, 1])
    assert scores.tolist() == [2.0, -6.0, 4.0, 0.0]


def test_presence_and_frequency_look_at_the_output_alone() -> None:
    sampling = Sampling(temperature=0.0, presence_penalty=0.5, frequency_penalty=0.25)
    scores = _run([1.0, 1.0, 1.0], sampling, prompt=[0, 0], output=[1, 2, 1])
    assert scores.tolist() == [1.0, 0.0, 0.25]


def test_repetition_comes_after_bias_and_before_presence() -> None:
    sampling = Sampling(
        temperature=0.0, logit_bias=((0, 3.0),), repetition_penalty=2.0, presence_penalty=1.0
    )
    assert _run([1.0, 0.0], sampling, output=[0]).tolist() == [1.0, 0.0]


def test_min_tokens_bars_every_ending_id_until_reached() -> None:
    sampling = Sampling(temperature=0.0, min_tokens=2, eos_ids=(0,), stop_ids=(2, 99))
    assert _run([9.0, 1.0, 9.0], sampling, output=[1]).tolist() == [-_INF, 1.0, -_INF]
    assert _run([9.0, 1.0, 9.0], sampling, output=[1, 1]).tolist() == [9.0, 1.0, 9.0]


def test_min_p_is_relative_to_the_best() -> None:
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    assert _kept(_run(logits, Sampling(min_p=0.31))) == [0, 1]
    assert _kept(_run(logits, Sampling(min_p=0.29))) == [0, 1, 2]
    assert _kept(_run(logits, Sampling(min_p=1.0))) == [0]


def test_min_p_sees_the_temperature() -> None:
    logits = np.log([0.5, 0.3])
    assert _kept(_run(logits, Sampling(min_p=0.5))) == [0, 1]
    assert _kept(_run(logits, Sampling(min_p=0.5, temperature=0.5))) == [0]


def test_top_k_boundary_tie_goes_to_the_lowest_id() -> None:
    assert _kept(_run([1.0, 2.0, 1.0, 1.0, 3.0], Sampling(top_k=3))) == [0, 1, 4]


def test_top_p_keeps_the_shortest_prefix() -> None:
    logits = np.log([0.15, 0.5, 0.05, 0.3])
    assert _kept(_run(logits, Sampling(top_p=0.45))) == [1]
    assert _kept(_run(logits, Sampling(top_p=0.79))) == [1, 3]
    assert _kept(_run(logits, Sampling(top_p=0.81))) == [0, 1, 3]
    assert _kept(_run(logits, Sampling(top_p=0.0))) == [1]


def test_top_p_tie_goes_to_the_lowest_id() -> None:
    assert _kept(_run([0.0, 0.0, 0.0, 0.0], Sampling(top_p=0.5))) == [0, 1]


def test_top_p_counts_the_mass_that_top_k_left() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert _kept(_run(logits, Sampling(top_p=0.55))) == [0, 1]
    assert _kept(_run(logits, Sampling(top_p=0.55, top_k=2))) == [0]


def test_padding_of_the_vocabulary_stays_barred() -> None:
    for sampling in (Sampling(), Sampling(top_k=4), Sampling(top_p=0.9999), Sampling(min_p=0.01)):
        assert _kept(_run([1.0, -_INF, 0.5, -_INF, -_INF], sampling)) == [0, 2]


@pytest.mark.parametrize("bad", [float("nan"), _INF])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_refused(bad: float, temperature: float) -> None:
    with pytest.raises(ModelError, match="expected numbers below"):
        _run([0.0, bad, 1.0], Sampling(temperature=temperature))


def test_an_empty_support_is_refused() -> None:
    with pytest.raises(ModelError, match="no token is possible"):
        _run([1.0, -_INF], Sampling(min_tokens=1, eos_ids=(0,)))


def test_foreign_ids_are_refused() -> None:
    with pytest.raises(InputError, match="logit_bias"):
        _run([1.0, 2.0], Sampling(logit_bias=((2, 1.0),)))
    with pytest.raises(InputError, match="tokenizer"):
        _run([1.0, 2.0], Sampling(repetition_penalty=1.1), prompt=[-1])
    with pytest.raises(InputError, match="tokenizer"):
        _run([1.0, 2.0], Sampling(presence_penalty=1.0), output=[7])


def _plain(
    logits: NDArray[np.float32], sampling: Sampling, prompt: list[int], output: list[int]
) -> set[int]:
    """The support, by sorting everything at every stage."""
    row = [float(value) for value in logits]
    for token, bias in sampling.logit_bias:
        row[token] += bias
    for token in {*prompt, *output}:
        positive = row[token] > 0
        penalty = sampling.repetition_penalty
        row[token] = row[token] / penalty if positive else row[token] * penalty
    for token in set(output):
        row[token] -= sampling.presence_penalty + sampling.frequency_penalty * output.count(token)
    ranked = sorted(range(len(row)), key=lambda token: (-row[token], token))
    best = row[ranked[0]]
    weight = {token: np.exp((row[token] - best) / sampling.temperature) for token in ranked}
    ranked = [token for token in ranked if weight[token] >= sampling.min_p]
    ranked = ranked[: sampling.top_k or None]
    total = sum(weight[token] for token in ranked)
    kept: set[int] = set()
    for token in ranked:
        kept.add(token)
        if sampling.top_p < 1 and sum(weight[other] for other in kept) >= sampling.top_p * total:
            break
    return kept


@st.composite
def _cases(draw: st.DrawFn) -> tuple[NDArray[np.float32], Sampling, list[int], list[int]]:
    # Multiples of 1/4 make ties common and float32 exact; odd top_p values avoid equal masses.
    size = draw(st.integers(2, 30))
    logits = draw(st.lists(st.integers(-20, 20), min_size=size, max_size=size))
    ids = st.lists(st.integers(0, size - 1), max_size=6)
    sampling = Sampling(
        temperature=draw(st.sampled_from([0.5, 1.0, 2.0])),
        top_k=draw(st.integers(0, size + 2)),
        top_p=draw(st.sampled_from([0.1234567, 0.5432101, 0.9012345, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.0123457, 0.2345671])),
        repetition_penalty=draw(st.sampled_from([1.0, 2.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25])),
        logit_bias=tuple(sorted({draw(st.integers(0, size - 1)): 1.5}.items())),
    )
    return np.array(logits, dtype=np.float32) / np.float32(4), sampling, draw(ids), draw(ids)


@given(case=_cases())
@settings(max_examples=300, deadline=None)
def test_support_equals_the_plain_chain(
    case: tuple[NDArray[np.float32], Sampling, list[int], list[int]],
) -> None:
    logits, sampling, prompt, output = case
    scores = process(logits, sampling, prompt_ids=prompt, output_ids=output)
    assert set(_kept(scores)) == _plain(logits, sampling, prompt, output)


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("k", [1, 40, 256, 300, 4097, 9000, 20_000])
def test_top_k_of_a_wide_row_equals_a_full_sort(k: int, scale: float) -> None:
    rng = np.random.default_rng(k)
    logits = np.round(rng.standard_normal(10_007) * scale * 8).astype(np.float32)
    logits[-7:] = -np.inf
    order = np.argsort(-logits, kind="stable")[:k]
    expected = sorted(int(token) for token in order if logits[token] > -np.inf)
    scores = process(logits, Sampling(top_k=k), prompt_ids=[], output_ids=[])
    assert _kept(scores) == expected


@pytest.mark.parametrize("scale", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("top_p", [0.01234, 0.5, 0.95, 0.9999999])
def test_top_p_of_a_wide_row_equals_a_full_sort(top_p: float, scale: float) -> None:
    rng = np.random.default_rng(5)
    logits = (rng.standard_normal(10_007) * scale).astype(np.float32)
    order = np.argsort(-logits, kind="stable")
    weights = np.exp(logits.astype(np.float64) - logits.max())[order]
    count = int(np.searchsorted(np.cumsum(weights), top_p * weights.sum())) + 1
    scores = process(logits, Sampling(top_p=top_p), prompt_ids=[], output_ids=[])
    # Summing in another order may move the end by a token at the far tail.
    assert len(_kept(scores)) == pytest.approx(count, abs=1)
    assert set(_kept(scores)) <= {int(token) for token in order[: count + 1]}


def test_log_softmax_sums_to_one_and_keeps_the_barred() -> None:
    logs = log_softmax64(np.array([1000.0, 999.0, -np.inf]))
    assert np.exp(logs).sum() == pytest.approx(1.0)
    assert logs[2] == -np.inf


def test_stages_see_only_what_earlier_ones_left() -> None:
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    both = Sampling(top_k=2, min_p=0.8)
    assert _kept(_run(logits, both)) == [0]
    assert _kept(_run(logits, replace(both, min_p=0.0))) == [0, 1]
