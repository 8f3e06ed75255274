"""The breaker: when a try is due."""

from hypothesis import given
from hypothesis import strategies as st

from draftkeep.breaker import Breaker


def test_it_opens_at_the_threshold_and_pauses_longer_each_time() -> None:
    breaker = Breaker(threshold=3, pause_s=1.0, max_pause_s=5.0)
    breaker.failed(10.0)
    breaker.failed(10.0)
    assert breaker.wait_s(10.0) == 0
    assert not breaker.is_open
    pauses = []
    now_s = 10.0
    for _ in range(5):
        breaker.failed(now_s)
        pauses.append(breaker.wait_s(now_s))
        now_s += pauses[-1]
        assert breaker.wait_s(now_s) == 0
        assert breaker.is_open
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_what_fails_in_one_row_opens_it_once() -> None:
    breaker = Breaker(threshold=3, pause_s=1.0, max_pause_s=60.0)
    for _ in range(64):
        breaker.failed(10.0)
    assert breaker.wait_s(10.0) == 1.0


def test_a_success_closes_it_and_forgets() -> None:
    breaker = Breaker(threshold=1, pause_s=1.0)
    breaker.failed(0.0)
    breaker.failed(1.0)
    assert breaker.doubtful
    breaker.succeeded()
    assert not breaker.doubtful
    assert not breaker.is_open
    assert breaker.wait_s(1.0) == 0
    breaker.failed(2.0)
    assert breaker.wait_s(2.0) == 1.0


@given(st.lists(st.booleans(), max_size=40), st.integers(1, 5))
def test_it_is_open_only_after_a_row_of_failures(outcomes: list[bool], threshold: int) -> None:
    breaker = Breaker(threshold=threshold, pause_s=1.0, max_pause_s=8.0)
    row = 0
    for went_well in outcomes:
        if went_well:
            breaker.succeeded()
            row = 0
        else:
            breaker.failed(0.0)
            row += 1
        assert (breaker.wait_s(0.0) > 0) == (row >= threshold)
        assert breaker.wait_s(0.0) <= 8.0
