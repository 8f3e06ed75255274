import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftkeep.policies.student_t import mean_interval, quantile

PROBABILITIES = (0.6, 0.95, 0.975, 0.999)
# Degrees of freedom -> quantiles, from tables.
TABLE = {
    1: (0.324919696, 6.313751515, 12.706204736, 318.308838986),
    2: (0.288675135, 2.91998558, 4.30265273, 22.32712477),
    3: (0.276670662, 2.353363435, 3.182446305, 10.214531852),
    4: (0.270722295, 2.131846786, 2.776445105, 7.17318222),
    7: (0.263166861, 1.894578605, 2.364624252, 4.785289629),
    30: (0.255605365, 1.697260887, 2.042272456, 3.385184867),
    101: (0.254015488, 1.66008063, 1.983731003, 3.172892666),
    2000: (0.253380807, 1.645615867, 1.961150826, 3.094312298),
}


@pytest.mark.parametrize("freedom", TABLE)
def test_quantiles_are_those_of_the_tables(freedom: int) -> None:
    found = [quantile(probability, freedom) for probability in PROBABILITIES]
    assert found == pytest.approx(TABLE[freedom], rel=2e-9)


def test_many_degrees_are_normal() -> None:
    assert quantile(0.95, 2001) == pytest.approx(quantile(0.95, 2000), rel=1e-3)


@given(st.lists(st.floats(-1, 1), min_size=2, max_size=40))
def test_the_mean_lies_inside_its_interval(values: list[float]) -> None:
    interval = mean_interval(values, 0.95)
    assert interval.count == len(values)
    assert interval.low <= interval.mean <= interval.high


def test_a_worked_example() -> None:
    interval = mean_interval([0.0, 0.2, 0.4], 0.95)
    half = 2.91998558 * 0.2 / math.sqrt(3)
    assert interval.mean == pytest.approx(0.2)
    assert (interval.low, interval.high) == pytest.approx((0.2 - half, 0.2 + half))


def test_one_value_proves_nothing() -> None:
    interval = mean_interval([0.5], 0.95)
    assert (interval.low, interval.high) == (-math.inf, math.inf)
