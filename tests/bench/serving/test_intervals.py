"""Ratios of alternating runs and their intervals."""

from typing import Any

import numpy as np
import pytest

from bench.serving.intervals import share_interval, slope, speed_ratio, steady_ratio


def _pairs(rng: Any, count: Any, *, faster: Any, noise: Any) -> Any:
    """Two ways on the same requests, whose common slowness differs from request to request."""
    common = rng.lognormal(0.0, 0.5, count)
    tokens = rng.integers(20, 60, count).tolist()
    one = (np.array(tokens) * common * rng.lognormal(0, noise, count) / faster).tolist()
    other = (np.array(tokens) * common * rng.lognormal(0, noise, count)).tolist()
    return {"tokens": tokens, "seconds": one, "other_tokens": tokens, "other_seconds": other}


def test_the_ratio_is_of_sums_and_lies_in_its_interval() -> None:
    found = speed_ratio(tokens=[10, 30], seconds=[1, 1], other_tokens=[5, 15], other_seconds=[1, 1])
    assert found.value == found.low == found.high == pytest.approx(2.0)
    assert "2" in found.text()


def test_the_interval_covers_the_true_ratio_as_often_as_it_says() -> None:
    rng = np.random.default_rng(3)
    hits = 0
    for _ in range(60):
        found = speed_ratio(**_pairs(rng, 24, faster=1.3, noise=0.1))
        assert found.low <= found.value <= found.high
        hits += found.low <= 1.3 <= found.high
    assert hits >= 50


def test_more_requests_narrow_the_interval() -> None:
    rng = np.random.default_rng(4)
    few = speed_ratio(**_pairs(rng, 8, faster=1.0, noise=0.1))
    many = speed_ratio(**_pairs(rng, 200, faster=1.0, noise=0.1))
    assert many.high - many.low < 0.5 * (few.high - few.low)


def test_a_few_slow_rounds_do_not_move_the_steady_ratio() -> None:
    rng = np.random.default_rng(6)
    hits, errors = 0, []
    for _ in range(60):
        pairs = _pairs(rng, 14, faster=0.98, noise=0.01)
        for slow in rng.integers(14, size=3):
            pairs["seconds"][slow] *= 1.5
        found = steady_ratio(**pairs)
        assert found.low <= found.value <= found.high
        errors.append((abs(found.value - 0.98), abs(speed_ratio(**pairs).value - 0.98)))
        hits += found.low <= 0.98 <= found.high
    assert hits >= 45
    steady, summed = np.mean(errors, axis=0)
    assert steady < 0.02 < 0.05 < summed


def test_the_steady_ratio_of_equal_rounds_is_theirs() -> None:
    found = steady_ratio(
        tokens=[10, 30], seconds=[1, 3], other_tokens=[10, 30], other_seconds=[2, 6]
    )
    assert found.value == found.low == found.high == pytest.approx(2.0)


@pytest.mark.parametrize("ratio", [speed_ratio, steady_ratio])
def test_unpaired_runs_are_refused(ratio: Any) -> None:
    with pytest.raises(ValueError, match="pairs"):
        ratio(tokens=[1], seconds=[1], other_tokens=[1, 2], other_seconds=[1, 2])
    with pytest.raises(ValueError, match="pairs"):
        ratio(tokens=[], seconds=[], other_tokens=[], other_seconds=[])


def test_the_share_is_of_sums_and_lies_in_its_interval() -> None:
    # One long step holds most of the time: the mean of the shares, 0.81, is far from the share.
    found = share_interval([0.9] * 9 + [0.0], [1.0] * 9 + [100.0])
    assert found.value == pytest.approx(8.1 / 109)
    assert found.low <= found.value <= found.high
    with pytest.raises(ValueError, match="pairs"):
        share_interval([], [])
    with pytest.raises(ValueError, match="pairs"):
        share_interval([1.0], [1.0, 2.0])


def test_slopes() -> None:
    line = slope([0, 1, 2, 3], [5.0, 7.0, 9.0, 11.0])
    assert line.value == line.low == line.high == pytest.approx(2.0)
    rng = np.random.default_rng(5)
    noisy = [slope(range(100), rng.normal(0, 1, 100).tolist()) for _ in range(60)]
    assert sum(one.low <= 0 <= one.high for one in noisy) >= 50
