"""A draw that leaves out what cannot win is the draw by definition, bit for bit."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftkeep.errors import ModelError
from draftkeep.kernels.draw import choose, draw
from draftkeep.kernels.noise import GumbelRow, gumbel
from draftkeep.kernels.processors import process
from draftkeep.kernels.sampling import Sampling

_SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([1e-30, 0.01, 0.5, 1.0, 1.7, 50.0, 1e30]),
    top_p=st.sampled_from([1.0, 1.0, 0.9, 0.01]),
    top_k=st.sampled_from([0, 0, 1, 40]),
    min_p=st.sampled_from([0.0, 0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    frequency_penalty=st.sampled_from([0.0, 0.7, -1.0]),
    logit_bias=st.sampled_from([(), ((0, 4.0), (3, -100.0))]),
    eos_ids=st.just((1,)),
    min_tokens=st.sampled_from([0, 9]),
)


@given(
    sampling=_SAMPLINGS,
    vocab=st.sampled_from([4, 17, 300, 5000]),
    scale=st.sampled_from([0.0, 0.3, 4.0, 1e4, 1e30]),
    ties=st.booleans(),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=300, deadline=None)
def test_it_equals_the_definition(
    sampling: Sampling, vocab: int, scale: float, ties: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = (rng.standard_normal(vocab) * scale).astype(np.float32)
    if ties:
        logits = np.round(logits)
        logits[rng.integers(0, vocab, vocab // 3)] = -np.inf
    logits[2] = max(float(logits.max()), 0.0)
    history: dict[str, Any] = {"prompt_ids": [2, 0], "output_ids": [2, 2, 1]}
    noise = GumbelRow(seed, 1, 3, vocab)
    expected = choose(process(logits, sampling, **history), gumbel(seed, 1, 3, vocab))
    assert draw(logits, sampling, noise, **history) == expected
    assert draw(logits, sampling, gumbel(seed, 1, 3, vocab), **history) == expected


@given(
    temperature=st.sampled_from([0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.8]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=60, deadline=None)
def test_a_short_row_uses_the_noise_of_the_ids_it_names(
    temperature: float, top_p: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    names = np.flatnonzero(rng.random(900) < 0.4)
    logits = rng.standard_normal(len(names)).astype(np.float32) * 3
    sampling = Sampling(temperature=temperature, top_p=top_p)
    noise = GumbelRow(seed, 0, 0, 900)
    scores = process(logits, sampling, prompt_ids=(), output_ids=())
    expected = choose(scores, gumbel(seed, 0, 0, 900)[names])
    for form in (noise, gumbel(seed, 0, 0, 900)):
        found = draw(logits, sampling, form, prompt_ids=(), output_ids=(), names_V=names)
        assert found == expected


def test_without_noise_it_is_the_argmax_of_the_penalised_row() -> None:
    sampling = Sampling(temperature=0.0, presence_penalty=1.0)
    logits = np.array([1.0, 1.5, 1.0], np.float32)
    assert draw(logits, sampling, None, prompt_ids=[], output_ids=[]) == 1
    assert draw(logits, sampling, None, prompt_ids=[], output_ids=[1]) == 0


@given(
    place=st.tuples(st.integers(-(2**65), 2**65), st.integers(0, 2**64), st.integers(0, 2**64 - 1)),
    vocab=st.integers(1, 700),
    stream=st.integers(0, 3),
    data=st.data(),
)
@settings(max_examples=200, deadline=None)
def test_a_part_of_a_noise_row_is_that_part(
    place: tuple[int, int, int], vocab: int, stream: int, data: Any
) -> None:
    """Few ids are made one by one, many from the whole row."""
    row, whole = GumbelRow(*place, vocab, stream), gumbel(*place, vocab, stream)
    ids = np.array(data.draw(st.lists(st.integers(0, vocab - 1), max_size=40)), dtype=np.int64)
    assert row.at(ids).tobytes() == whole[ids].tobytes()
    assert row.at(np.arange(vocab)).tobytes() == whole.tobytes()
    assert row.highest() == whole.max()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("top_k", [0, 2])
def test_broken_logits_are_refused(bad: float, top_k: int) -> None:
    with pytest.raises(ModelError, match="expected numbers below"):
        draw(
            np.array([0.0, bad, 1.0], np.float32),
            Sampling(top_k=top_k),
            GumbelRow(0, 0, 0, 3),
            prompt_ids=[],
            output_ids=[],
        )
