import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftkeep.errors import DeniedError
from draftkeep.policies.retention import (
    effective_deadline,
    expiry_bucket,
    period_start,
    read_clock,
)

TIMES_S = st.integers(1, 2**40)
PERIODS_S = st.integers(1, 10**6)


@given(at_s=st.floats(0, 2**40), period_s=PERIODS_S)
def test_a_period_contains_its_times(at_s: float, period_s: int) -> None:
    start_s = period_start(at_s, period_s)
    assert start_s <= at_s < start_s + period_s
    assert start_s % period_s == 0


@given(expiry_s=TIMES_S, period_s=PERIODS_S)
def test_a_bucket_ends_at_or_just_after_every_expiry_in_it(expiry_s: int, period_s: int) -> None:
    bucket = expiry_bucket(expiry_s, period_s)
    assert 0 <= bucket - expiry_s < period_s
    assert bucket % period_s == 0


def test_an_aligned_expiry_is_its_own_bucket() -> None:
    assert expiry_bucket(7200, 3600) == 7200
    assert expiry_bucket(7201, 3600) == 10800


def test_the_earlier_deadline_wins() -> None:
    assert effective_deadline(10, 20) == effective_deadline(20, 10) == 10


@pytest.mark.parametrize("reading", [math.nan, math.inf, -math.inf, 0.0, -5.0])
def test_an_unreadable_clock_denies(reading: float) -> None:
    with pytest.raises(DeniedError, match="clock"):
        read_clock(lambda: reading)
