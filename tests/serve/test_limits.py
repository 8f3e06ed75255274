"""Limits: never more than a burst above the rate, always refilled, one tenant beside another."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftkeep.config import LimitsConfig
from draftkeep.errors import BusyError, InputError
from draftkeep.serve.limits import Limits, Ticket
from tests.clock import Clock

MINUTE_S = 60.0


def limits(clock: Callable[[], float], **tenants: LimitsConfig) -> Limits:
    return Limits(tenants or {"acme": LimitsConfig()}, clock=clock)


@dataclass(slots=True, kw_only=True)
class Open:
    """A request that was let in: when, and how much of what it asked for it has used."""

    at_s: float
    asked: int
    ticket: Ticket
    used: int | None = None


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("wait"), st.sampled_from([0.0, 1.0, 30.0, 60.0]) | st.floats(0, 90)),
        st.tuples(st.just("enter"), st.sampled_from([20, 60, 100]) | st.integers(1, 100)),
        st.tuples(st.just("close"), st.sampled_from([0.0, 1.0]) | st.floats(0, 1)),
    ),
    max_size=60,
)


def play(actions: list[tuple[str, float]], limit: LimitsConfig) -> tuple[list[Open], Clock, Limits]:
    """Let requests in and out as told, each time closing the oldest one that is open."""
    clock = Clock()
    under = limits(clock, acme=limit)
    entered: list[Open] = []
    for what, value in actions:
        if what == "wait":
            clock.now_s += value
        elif what == "enter":
            try:
                ticket = under.enter("acme", choices=1, tokens=int(value))
            except BusyError:
                continue
            entered.append(Open(at_s=clock.now_s, asked=int(value), ticket=ticket))
        else:
            open_ones = [one for one in entered if one.used is None]
            if open_ones:
                open_ones[0].used = int(value * open_ones[0].asked)
                open_ones[0].ticket.close(open_ones[0].used)
    return entered, clock, under


@given(ACTIONS)
def test_no_interval_sees_more_than_a_burst_and_the_rate(actions: list[tuple[str, float]]) -> None:
    entered, _, _ = play(actions, LimitsConfig(tokens_per_minute=100, requests_per_minute=10))
    for first in range(len(entered)):
        tokens = 0
        for last in range(first, len(entered)):
            one = entered[last]
            tokens += one.asked if one.used is None else one.used
            minutes = (one.at_s - entered[first].at_s) / MINUTE_S
            assert tokens <= 100 + 100 * minutes + 1e-3
            assert last - first + 1 <= 10 + 10 * minutes + 1e-3


@given(ACTIONS, st.integers(1, 100))
def test_after_a_minute_everything_is_there_again(
    actions: list[tuple[str, float]], tokens: int
) -> None:
    _, clock, under = play(actions, LimitsConfig(tokens_per_minute=100, requests_per_minute=10))
    clock.now_s += MINUTE_S
    under.enter("acme", choices=1, tokens=100)
    clock.now_s += MINUTE_S * tokens / 100
    under.enter("acme", choices=1, tokens=tokens)


@given(ACTIONS, st.integers(1, 100))
def test_who_comes_back_when_told_is_let_in(actions: list[tuple[str, float]], tokens: int) -> None:
    _, clock, under = play(actions, LimitsConfig(tokens_per_minute=100, requests_per_minute=10))
    wait_s = refusal_s(under, tokens)
    if wait_s is None:
        return
    assert 0 < wait_s <= MINUTE_S
    early_s = max(0.0, wait_s - 0.01)
    clock.now_s += early_s
    assert not early_s or refusal_s(under, tokens) is not None
    clock.now_s += wait_s - early_s
    under.enter("acme", choices=1, tokens=tokens)


def refusal_s(under: Limits, tokens: int) -> float | None:
    """After how long a request may come back; None for one that was let in."""
    try:
        under.enter("acme", choices=1, tokens=tokens)
    except BusyError as busy:
        return busy.retry_after_s
    return None


@given(ACTIONS, st.integers(2, 100))
def test_a_peek_says_what_the_shortest_request_would_be_told(
    actions: list[tuple[str, float]], tokens: int
) -> None:
    limit = LimitsConfig(tokens_per_minute=100, requests_per_minute=10, concurrent=5)
    _, _, under = play(actions, limit)
    before = under.usage()["acme"]
    told = None
    try:
        under.peek("acme", choices=1, tokens=tokens)
    except BusyError as busy:
        told = busy.retry_after_s
    refused = before["refused"] + (told is not None)
    assert under.usage()["acme"] == before | {"refused": refused}
    assert refusal_s(under, tokens) == told


@pytest.mark.parametrize(("choices", "fits"), [(3, True), (4, False), (10, False)])
def test_a_peek_refuses_what_is_too_much_by_itself(choices: int, fits: bool) -> None:
    under = limits(Clock(), acme=LimitsConfig(tokens_per_minute=10, concurrent=3))
    if fits:
        under.peek("acme", choices=choices, tokens=choices + 1)
        return
    with pytest.raises(InputError):
        under.peek("acme", choices=choices, tokens=choices + 1)
    with pytest.raises(InputError):
        under.enter("acme", choices=choices, tokens=choices + 1)


@given(ACTIONS)
def test_choices_under_way_stay_under_the_limit(actions: list[tuple[str, float]]) -> None:
    entered, _, under = play(actions, LimitsConfig(concurrent=3))
    running = sum(one.used is None for one in entered)
    use = under.usage()["acme"]
    assert use["running"] == running <= 3
    assert use["tokens"] == sum(one.used or 0 for one in entered)
    for one in entered:
        one.ticket.close(0)
    assert under.usage()["acme"]["running"] == 0


def test_what_was_not_used_comes_back_at_once() -> None:
    under = limits(Clock(), acme=LimitsConfig(tokens_per_minute=100))
    ticket = under.enter("acme", choices=1, tokens=90)
    with pytest.raises(BusyError):
        under.enter("acme", choices=1, tokens=20)
    ticket.close(30)
    ticket.close(0)
    under.enter("acme", choices=1, tokens=70)
    with pytest.raises(BusyError, match="tokens per minute"):
        under.enter("acme", choices=1, tokens=1)


def test_what_comes_back_late_was_refilled_already() -> None:
    clock = Clock()
    under = limits(clock, acme=LimitsConfig(tokens_per_minute=100))
    slow = under.enter("acme", choices=1, tokens=100)
    clock.now_s += MINUTE_S
    under.enter("acme", choices=1, tokens=100)
    slow.close(0)
    with pytest.raises(BusyError):
        under.enter("acme", choices=1, tokens=1)


def test_a_refused_request_takes_nothing() -> None:
    clock = Clock()
    under = limits(clock, acme=LimitsConfig(tokens_per_minute=60, requests_per_minute=2))
    under.enter("acme", choices=1, tokens=60)
    for _ in range(5):
        with pytest.raises(BusyError) as refused:
            under.enter("acme", choices=1, tokens=30)
    assert refused.value.retry_after_s == pytest.approx(30)
    clock.now_s += 30
    under.enter("acme", choices=1, tokens=30)
    assert under.usage()["acme"] == {"requests": 2, "tokens": 0, "running": 2, "refused": 5}


def test_what_can_never_enter_is_no_reason_to_come_back() -> None:
    under = limits(Clock(), acme=LimitsConfig(concurrent=2, tokens_per_minute=50))
    for choices, tokens, param in ((3, 1, "n"), (1, 51, "max_tokens")):
        with pytest.raises(InputError) as refused:
            under.enter("acme", choices=choices, tokens=tokens)
        assert refused.value.param == param
    under.enter("acme", choices=2, tokens=50)


def test_one_tenant_at_its_limit_costs_no_other_anything() -> None:
    tight = LimitsConfig(concurrent=1, requests_per_minute=1, tokens_per_minute=10)
    under = limits(Clock(), acme=tight, other=tight, free=LimitsConfig())
    under.enter("acme", choices=1, tokens=10)
    with pytest.raises(BusyError):
        under.enter("acme", choices=1, tokens=10)
    under.enter("other", choices=1, tokens=10)
    for _ in range(1000):
        under.enter("free", choices=8, tokens=10**9)
    assert [use["refused"] for use in under.usage().values()] == [1, 0, 0]


def test_an_unknown_tenant_is_let_in_nowhere() -> None:
    with pytest.raises(KeyError):
        limits(Clock()).enter("stranger", choices=1, tokens=1)


def test_a_clock_that_goes_back_gives_nothing() -> None:
    clock = Clock()
    under = limits(clock, acme=LimitsConfig(requests_per_minute=1))
    under.enter("acme", choices=1, tokens=1)
    for step_s in (-500.0, 400.0):
        clock.now_s += step_s
        with pytest.raises(BusyError):
            under.enter("acme", choices=1, tokens=1)


def test_threads_that_race_share_one_limit() -> None:
    under = limits(Clock(), acme=LimitsConfig(concurrent=5, tokens_per_minute=10_000))
    start, seen = threading.Barrier(8), []

    def work() -> None:
        start.wait()
        for _ in range(200):
            try:
                ticket = under.enter("acme", choices=1, tokens=50)
            except BusyError:
                continue
            seen.append(under.usage()["acme"]["running"])
            closing = [threading.Thread(target=ticket.close, args=(0,)) for _ in range(2)]
            for thread in closing:
                thread.start()
            for thread in closing:
                thread.join()

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert seen
    assert max(seen) <= 5
    use = under.usage()["acme"]
    assert (use["running"], use["tokens"]) == (0, 0)
    under.enter("acme", choices=5, tokens=10_000)
