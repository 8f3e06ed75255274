import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftkeep.errors import DeniedError
from draftkeep.policies.retention import (
    effective_deadline,
    period_start,
    read_clock,
)

PERIODS_S = st.integers(1, 10**6)


@given(at_s=st.floats(0, 2**40), period_s=PERIODS_S)
def test_a_period_contains_its_times(at_s: float, period_s: int) -> None:
    start_s = period_start(at_s, period_s)
    assert start_s <= at_s < start_s + period_s
    assert start_s % period_s == 0


def test_the_earlier_deadline_wins() -> None:
    assert effective_deadline(10, 20) == effective_deadline(20, 10) == 10


@pytest.mark.parametrize("reading", [math.nan, math.inf, -math.inf, 0.0, -5.0])
def test_an_unreadable_clock_denies(reading: float) -> None:
    with pytest.raises(DeniedError, match="clock"):
        read_clock(lambda: reading)
