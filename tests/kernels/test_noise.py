"""Noise version 1 against golden values and a second implementation of its generator.

That its streams are independent is tested on values alone, with planted bugs that must be seen.
"""

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations, pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from draftkeep.kernels import noise
from draftkeep.kernels.noise import ACCEPT, COUPLED, DRAFT, RECOVERY, GumbelRow, gumbel, uniform

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


STREAMS = (COUPLED, DRAFT, ACCEPT, RECOVERY)
# Neighbours, and what a stream would be shifted by in a word it shares.
INDICES = sorted({at + (part << shift) for at, part in product(range(4), repeat=2)
                  for shift in (2, 16, 32, 48, 62)})  # fmt: skip
PLACES = list(product((0, 1, _MASK), (0, 1, 2, 3), INDICES, STREAMS))
FAR_IDS = np.array([(1 << 20) + 4 * block for block in range(4)])


def _whole(seed: int, choice: int, index: int, stream: int) -> Any:
    return gumbel(seed, choice, index, 16, stream)


def _few(seed: int, choice: int, index: int, stream: int) -> Any:
    return GumbelRow(seed, choice, index, 1 << 30, stream).at(FAR_IDS)


def _repeated(noise_of: Callable[..., Any]) -> int:
    """How many values two places share. By chance none: they have 53 bits."""
    values = np.concatenate([noise_of(*place) for place in PLACES])
    return len(values) - len(np.unique(values))


@pytest.mark.parametrize("noise_of", [_whole, _few])
def test_no_two_places_share_a_counter(noise_of: Callable[..., Any]) -> None:
    assert _repeated(noise_of) == 0


# Seed, choice, index and stream to those used in their place, and how many blocks of ids further.
FOLDS: dict[str, Callable[[int, int, int, int], tuple[int, int, int, int, int]]] = {
    "the stream is ignored": lambda s, c, i, x: (s, c, i, 0, 0),
    "recovery uses the draft's": lambda s, c, i, x: (s, c, i, DRAFT if x == RECOVERY else x, 0),
    "the test uses the coupled": lambda s, c, i, x: (s, c, i, COUPLED if x == ACCEPT else x, 0),
    "the stream is added to the index": lambda s, c, i, x: (s, c, i + x, 0, 0),
    "the stream is a low part of the index": lambda s, c, i, x: (s, c, (i << 2 | x) & _MASK, 0, 0),
    "the stream is a high part of the index": lambda s, c, i, x: (s, c, i + (x << 32), 0, 0),
    "the stream is the block": lambda s, c, i, x: (s, c, i, 0, x),
    "the stream is in the choice": lambda s, c, i, x: (s, c ^ x, i, 0, 0),
    "the choice is in the seed": lambda s, c, i, x: (s + c, 0, i, x, 0),
    "the index is cut to 32 bits": lambda s, c, i, x: (s, c, i & 0xFFFFFFFF, x, 0),
}


@pytest.mark.parametrize("noise_of", [_whole, _few])
@pytest.mark.parametrize("bug", FOLDS)
def test_places_that_share_a_counter_are_seen(
    bug: str, noise_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    fold, high_bits, block_of = FOLDS[bug], noise._high_bits, noise._philox

    def row(seed: int, choice: int, index: int, vocab: int, stream: int) -> Any:
        *place, further = fold(seed, choice, index, stream)
        seed, choice, index, stream = place
        return high_bits(seed, choice, index, vocab + 4 * further, stream)[4 * further :]

    def block(counter: tuple[int, int, int, int], key: tuple[int, int]) -> Any:
        seed, choice, index, stream, further = fold(*key, *counter[1:3])
        return block_of((counter[0] + further, index, stream, 0), (seed, choice))

    monkeypatch.setattr(noise, "_high_bits", row)
    monkeypatch.setattr(noise, "_philox", block)
    assert _repeated(noise_of) > 100


def _largest_correlation() -> float:
    """Of the u of two ids, all streams, and this index or the next, over many places."""
    rows = [
        [gumbel(seed, 0, index + lag, 2, stream) for lag in (0, 1) for stream in STREAMS]
        for seed in range(60)
        for index in range(0, 100, 2)
    ]
    u = np.exp(-np.exp(-np.array(rows))).reshape(len(rows), -1)
    between = np.corrcoef(u, rowvar=False) - np.eye(u.shape[1])
    return float(np.abs(between).max())


def test_streams_are_not_correlated() -> None:
    # 3,000 places: one standard deviation is 0.018.
    assert _largest_correlation() < 0.08


@pytest.mark.parametrize("lag", [0, 1])
def test_a_stream_that_mirrors_another_is_seen(lag: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 - u shares no value with u and is as uniform."""
    high_bits = noise._high_bits

    def mirrored(seed: int, choice: int, index: int, vocab: int, stream: int) -> Any:
        if stream == RECOVERY:
            return (1 << 53) - 1 - high_bits(seed, choice, index + lag, vocab, DRAFT)
        return high_bits(seed, choice, index, vocab, stream)

    monkeypatch.setattr(noise, "_high_bits", mirrored)
    assert _repeated(_whole) == 0
    assert _largest_correlation() > 0.9
