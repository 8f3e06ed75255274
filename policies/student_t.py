"""Student's t: the interval of a mean from few independent values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

# Above this the normal quantile differs in the fourth digit.
_NORMAL_ABOVE = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A mean of `count` values, with a lower and an upper one-sided confidence bound."""

    count: int
    mean: float
    low: float
    high: float


def mean_interval(values: Sequence[float], confidence: float) -> Interval:
    """The mean of independent values and a bound on each side, each holding with `confidence`.

    mean -+ t(confidence, n - 1) * s / sqrt(n). A single value has no spread to judge by and gets
    infinite bounds. Values must be finite and there must be one at least.
    """
    mean = fmean(values)
    if len(values) < 2:
        return Interval(count=len(values), mean=mean, low=-math.inf, high=math.inf)
    half = quantile(confidence, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(count=len(values), mean=mean, low=mean - half, high=mean + half)


def quantile(probability: float, freedom: int) -> float:
    """The value that a t variable of `freedom` >= 1 degrees stays below with 0.5 < p < 1."""
    if freedom > _NORMAL_ABOVE:
        return NormalDist().inv_cdf(probability)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        if 0.5 + _central(middle, freedom) / 2 < probability:
            low = middle
        else:
            high = middle
    return math.tan(low) * math.sqrt(freedom)


def _central(theta: float, freedom: int) -> float:
    """P(|t| < sqrt(freedom) * tan(theta)); Abramowitz and Stegun 26.7.3 and 26.7.4."""
    sine, cosine = math.sin(theta), math.cos(theta)
    if freedom == 1:
        return 2 * theta / math.pi
    odd = freedom % 2
    term = cosine if odd else 1.0
    total = term
    for step in range(2 + odd, freedom - 1, 2):
        term *= (step - 1) / step * cosine * cosine
        total += term
    return 2 / math.pi * (theta + sine * total) if odd else sine * total
