"""The attack finds what is there to be found and nothing else."""

from typing import Any

import numpy as np
import pytest

from bench.streams.attack import VIEWS, accuracy, delay_s, stock
from bench.streams.client import Event, Stream

STEP_S = 0.05


def _stream(prompt: Any, bursts: Any, rng: Any, *, padded: Any = False, tick_s: Any = None) -> Any:
    """One event a token; the tokens of a burst leave together, or all of them on a tick."""
    events: list[Event] = []
    at_s = 0.1
    for burst in bursts:
        at_s += STEP_S * rng.uniform(0.9, 1.1)
        for place in range(burst):
            text = "x" * int(rng.integers(1, 9))
            size = 256 if padded else 100 + len(text)
            when = at_s + 1e-4 * place if tick_s is None else tick_s * (1 + len(events))
            events.append(Event(at_s=when, size=size, text=text))
    return Stream(prompt=prompt, events=tuple(events))


def _patterns(rng: Any, prompts: Any) -> Any:
    """How many tokens each step of a prompt brings; every prompt has its own, 48 in all."""
    found = []
    for _ in range(prompts):
        bursts = rng.integers(1, 6, 60)
        last = int(np.searchsorted(np.cumsum(bursts), 48))
        bursts = bursts[: last + 1].tolist()
        bursts[-1] -= sum(bursts) - 48
        found.append([burst for burst in bursts if burst])
    return found


@pytest.fixture(name="streams")
def _streams() -> Any:
    def make(**options: Any) -> Any:
        rng = np.random.default_rng(1)
        patterns = _patterns(rng, 6)
        return [_stream(number % 6, patterns[number % 6], rng, **options) for number in range(36)]

    return make


def test_bursts_give_a_prompt_away_unless_events_are_paced(streams: Any) -> None:
    assert accuracy(streams(), VIEWS["gaps"]) > 0.9
    assert accuracy(streams(padded=True), VIEWS["all"]) > 0.9
    paced = streams(padded=True, tick_s=0.02)
    for view in VIEWS.values():
        assert accuracy(paced, view) < 0.4


def test_padding_hides_sizes_and_one_event_a_token_hides_counts(streams: Any) -> None:
    assert accuracy(streams(padded=True), VIEWS["sizes"]) < 0.4
    assert accuracy(streams(), VIEWS["count"]) < 0.4
    assert accuracy([stock(one) for one in streams()], VIEWS["count"]) > 0.4


def test_stock_joins_the_events_of_a_step() -> None:
    rng = np.random.default_rng(2)
    found = _stream(0, [1, 4, 2, 1, 5], rng)
    joined = stock(found)
    assert [event.at_s for event in joined.events] == [
        found.events[at].at_s for at in (0, 1, 5, 7, 8)
    ]
    texts = "".join(event.text for event in found.events)
    assert "".join(event.text for event in joined.events) == texts
    assert joined.events[1].size == 100 + len(joined.events[1].text)
    assert joined.bytes < found.bytes
    single = Stream(prompt=0, events=found.events[:1])
    assert stock(single) == single


def test_delay_is_by_character() -> None:
    soon = Stream(
        prompt=0, events=(Event(at_s=1, size=9, text="ab"), Event(at_s=2, size=9, text="c"))
    )
    late = Stream(prompt=0, events=(Event(at_s=4, size=9, text="abc"),))
    assert delay_s(late, soon) == pytest.approx((3 + 3 + 2) / 3)
    assert delay_s(soon, soon) == 0
