"""Ratios of two ways of doing the same work, with their uncertainty, request by request.

Suffixes: N requests (or rounds), R bootstrap draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_DRAWS = 2000
_SEED = 5
_TAILS = (2.5, 97.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure with its 95 % interval."""

    value: float
    low: float
    high: float

    def text(self) -> str:
        """For a table: value [low, high]."""
        return f"{self.value:.3g} [{self.low:.3g}, {self.high:.3g}]"


def speed_ratio(
    *,
    tokens: Sequence[int],
    seconds: Sequence[float],
    other_tokens: Sequence[int],
    other_seconds: Sequence[float],
) -> Interval:
    """Tokens a second of the first over those of the other, on the same N requests.

    The ratio is of sums; the interval is a bootstrap over requests, each drawn with both of its
    runs, so that a slow minute of the machine hits both sides of a pair.
    """
    mine, theirs = _both(tokens, seconds, other_tokens, other_seconds)
    picks_RN = _picks(mine.shape[1])
    ratios_R = _ratio(mine[:, picks_RN], theirs[:, picks_RN])
    low, high = np.percentile(ratios_R, _TAILS)
    return Interval(value=float(_ratio(mine, theirs)), low=float(low), high=float(high))


def steady_ratio(
    *,
    tokens: Sequence[int],
    seconds: Sequence[float],
    other_tokens: Sequence[int],
    other_seconds: Sequence[float],
) -> Interval:
    """Like `speed_ratio`, for differences smaller than what a slow moment of the machine makes.

    The median of the means of all pairs of the N rounds' log ratios (the estimator of Hodges and
    Lehmann, 1963), which a few disturbed rounds do not move; the interval is a bootstrap over
    rounds.
    """
    mine, theirs = _both(tokens, seconds, other_tokens, other_seconds)
    logs_N = np.log((mine[0] / mine[1]) / (theirs[0] / theirs[1]))
    logs_R = [_centre(logs_N[picks_N]) for picks_N in _picks(len(logs_N))]
    low, high = np.exp(np.percentile(logs_R, _TAILS))
    return Interval(value=float(np.exp(_centre(logs_N))), low=float(low), high=float(high))


def share_interval(parts: Sequence[float], wholes: Sequence[float]) -> Interval:
    """The sum of N parts over the sum of their wholes, and a bootstrap interval over the pairs."""
    parts_N, wholes_N = np.array(parts, float), np.array(wholes, float)
    if parts_N.shape != wholes_N.shape or not len(parts_N):
        raise ValueError(f"pairs are needed, got {len(parts_N)} parts of {len(wholes_N)} wholes")
    picks_RN = _picks(len(parts_N))
    shares_R = parts_N[picks_RN].sum(axis=1) / wholes_N[picks_RN].sum(axis=1)
    low, high = np.percentile(shares_R, _TAILS)
    return Interval(value=float(parts_N.sum() / wholes_N.sum()), low=float(low), high=float(high))


def slope(x: Sequence[float], y: Sequence[float]) -> Interval:
    """The least-squares slope of y over x with its 95 % interval from the residuals.

    The residuals of a growing process are not independent, so the interval is a rough one.
    """
    x_N, y_N = np.array(x, float), np.array(y, float)
    centred_N = x_N - x_N.mean()
    spread = float((centred_N**2).sum())
    value = float((centred_N * y_N).sum()) / spread
    rest_N = y_N - y_N.mean() - value * centred_N
    error = float(np.sqrt((rest_N**2).sum() / max(1, len(x_N) - 2) / spread))
    return Interval(value=value, low=value - 1.96 * error, high=value + 1.96 * error)


def _both(
    tokens: Sequence[int],
    seconds: Sequence[float],
    other_tokens: Sequence[int],
    other_seconds: Sequence[float],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Each way's tokens and seconds, (2, N)."""
    mine, theirs = np.array([tokens, seconds], float), np.array([other_tokens, other_seconds])
    if mine.shape != theirs.shape or not mine.shape[1]:
        raise ValueError(f"pairs of runs are needed, got {mine.shape[1]} and {theirs.shape[1]}")
    return mine, theirs


def _centre(logs_N: NDArray[np.float64]) -> float:
    """The median of the means of all pairs, each value with itself too."""
    first, second = np.triu_indices(len(logs_N))
    return float(np.median((logs_N[first] + logs_N[second]) / 2))


def _picks(count: int) -> NDArray[np.int64]:
    rng = np.random.default_rng(_SEED)
    return rng.integers(count, size=(_DRAWS, count))


def _ratio(mine: NDArray[np.float64], theirs: NDArray[np.float64]) -> NDArray[np.float64]:
    tokens, seconds = mine.sum(axis=-1)
    other_tokens, other_seconds = theirs.sum(axis=-1)
    return np.asarray((tokens / seconds) / (other_tokens / other_seconds))
