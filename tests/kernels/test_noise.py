"""Noise version 1 against golden values and a second implementation of its generator."""

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from draftkeep.kernels.noise import ACCEPT, COUPLED, DRAFT, RECOVERY, gumbel, uniform

_MASK = (1 << 64) - 1
_WORDS = st.integers(0, _MASK)


def _philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x64-10 from its definition: ten rounds of two multiplications and a key step."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (
            (right >> 64) ^ c1 ^ k0,
            right & _MASK,
            (left >> 64) ^ c3 ^ k1,
            left & _MASK,
        )
        k0 = (k0 + 0x9E3779B97F4A7C15) & _MASK
        k1 = (k1 + 0xBB67AE8584CAA73B) & _MASK
    return c0, c1, c2, c3


def _plain(seed: int, choice: int, index: int, token: int, stream: int = 0) -> float:
    word = _philox((token // 4, index, stream, 0), (seed, choice))[token % 4]
    return -math.log(-math.log(((word >> 11) + 0.5) * 2.0**-53))


def test_plain_generator_gives_the_published_answer() -> None:
    words = [f"{word:016x}" for word in _philox((0, 0, 0, 0), (0, 0))]
    assert words == ["16554d9eca36314c", "db20fe9d672d0fdc", "d7e772cee186176b", "7e68b68aec7ba23b"]


def test_golden_values() -> None:
    row = gumbel(7, 0, 3, 10)
    assert row[[0, 1]] == pytest.approx([1.30470899, -0.26603848], abs=5e-9)
    assert row[9] == pytest.approx(-1.071509817144192, abs=1e-15)


@given(seed=_WORDS, choice=_WORDS, index=st.integers(0, 1 << 40), vocab=st.integers(1, 70))
@settings(deadline=None)
def test_equals_the_plain_generator(seed: int, choice: int, index: int, vocab: int) -> None:
    expected = [_plain(seed, choice, index, token) for token in range(vocab)]
    assert gumbel(seed, choice, index, vocab) == pytest.approx(expected, rel=1e-13, abs=1e-13)


@given(seed=_WORDS, choice=_WORDS, index=st.integers(0, 1 << 40), stream=st.integers(1, 3))
@settings(deadline=None)
def test_streams_equal_the_plain_generator(seed: int, choice: int, index: int, stream: int) -> None:
    expected = [_plain(seed, choice, index, token, stream) for token in range(9)]
    assert gumbel(seed, choice, index, 9, stream) == pytest.approx(expected, rel=1e-13, abs=1e-13)
    number = uniform(seed, choice, index, stream)
    assert 0.0 < number < 1.0
    assert -math.log(-math.log(number)) == pytest.approx(expected[0], rel=1e-12, abs=1e-12)


def test_streams_do_not_share_noise() -> None:
    rows = [gumbel(5, 0, 3, 64, stream) for stream in (COUPLED, DRAFT, ACCEPT, RECOVERY)]
    rows.append(gumbel(5, 0, 4, 64))
    for left, right in combinations(rows, 2):
        assert not np.isclose(left, right).any()
    assert np.array_equal(gumbel(5, 0, 3, 64), rows[0])


def test_uniform_numbers_are_uniform() -> None:
    numbers = [uniform(seed, 0, index, ACCEPT) for seed in range(40) for index in range(50)]
    assert stats.kstest(numbers, "uniform").pvalue > 1e-3


@pytest.mark.parametrize("index", [0, 1, 2**32, 2**63])
def test_first_and_far_indices(index: int) -> None:
    expected = [_plain(1, 2, index, token) for token in range(5)]
    assert gumbel(1, 2, index, 5) == pytest.approx(expected, rel=1e-13)


def test_a_longer_row_begins_with_the_shorter() -> None:
    assert np.array_equal(gumbel(3, 1, 4, 1001)[:333], gumbel(3, 1, 4, 333))


def test_seed_and_choice_are_modulo_two_to_the_64() -> None:
    assert np.array_equal(gumbel(-1, 1 << 64, 0, 8), gumbel(_MASK, 0, 0, 8))


def test_every_part_of_the_key_matters() -> None:
    rows = [gumbel(*key, 64) for key in [(5, 0, 0), (6, 0, 0), (5, 1, 0), (5, 0, 1)]]
    for left, right in pairwise(rows):
        assert not np.isclose(left, right).any()


def test_moments_are_those_of_a_gumbel() -> None:
    row = gumbel(11, 0, 0, 400_000)
    assert np.isfinite(row).all()
    assert row.mean() == pytest.approx(0.5772156649, abs=0.01)
    assert row.var() == pytest.approx(math.pi**2 / 6, abs=0.02)


def test_threads_do_not_disturb_each_other() -> None:
    alone = [gumbel(9, 0, index, 2000) for index in range(40)]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda index: gumbel(9, 0, index, 2000), range(40)))
    assert all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))


def test_negative_index_is_refused() -> None:
    with pytest.raises(ValueError, match="must not be negative"):
        gumbel(0, 0, -1, 4)
    with pytest.raises(ValueError, match="must not be negative"):
        uniform(0, 0, 0, -1)
