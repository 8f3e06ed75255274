"""Bursts leave on a schedule: their times and sizes do not follow how the events came."""

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftkeep.serve.http.chunks import Chunk
from draftkeep.serve.http.pacing import Pacer

TICK_S = 0.25


class Timeline:
    """A clock that only `sleep` moves, and events that become available at times of it."""

    def __init__(self, arrivals: list[tuple[int, Chunk]]) -> None:
        self.now_s = 100.0
        self.arrivals = arrivals
        self.moved = asyncio.Condition()
        self.lateness: list[float] = []

    def clock(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        async with self.moved:
            late_s = self.lateness.pop(0) if self.lateness else 0.0
            self.now_s += max(0.0, seconds) + late_s
            self.moved.notify_all()
        for _ in range(20):  # the reader takes what has come meanwhile
            await asyncio.sleep(0)

    async def events(self) -> AsyncIterator[Chunk]:
        for tick, event in self.arrivals:
            async with self.moved:
                while self.now_s < 100.0 + tick * TICK_S:
                    await self.moved.wait()
            yield event


def run(
    arrivals: list[tuple[int, Chunk]], *, choices: int = 1, lateness: tuple[float, ...] = ()
) -> list[tuple[float, str]]:
    """(time, burst) of everything released."""

    async def go() -> list[tuple[float, str]]:
        time = Timeline(arrivals)
        time.lateness = list(lateness)
        pacer = Pacer(
            choices,
            filler=lambda index: f"<{index}>",
            tick_s=TICK_S,
            clock=time.clock,
            sleep=time.sleep,
        )
        return [(time.now_s, burst) async for burst in pacer.bursts(time.events())]

    return asyncio.run(go())


def choice(index: int, *texts: str) -> list[Chunk]:
    last = len(texts) - 1
    return [Chunk(line=text, choice=index, last=at == last) for at, text in enumerate(texts)]


def gaps(bursts: list[tuple[float, str]]) -> list[float]:
    times = [100.0, *(at for at, _ in bursts)]
    return [after - before for before, after in itertools.pairwise(times)]


@given(st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_every_gap_is_a_tick_whatever_came_when(waits: list[int]) -> None:
    events = [*choice(0, "a", "b", "c", "d", "e"), Chunk(line="[DONE]")]
    ticks = [sum(waits[: at + 1]) for at in range(5)]
    ticks.append(ticks[-1])
    bursts = run(list(zip(ticks, events, strict=True)))
    assert set(gaps(bursts)) == {TICK_S}
    real = [burst for _, burst in bursts if burst != "<0>"]
    assert real == ["a", "b", "c", "d", "e", "[DONE]"]


def test_blocks_and_single_tokens_look_the_same() -> None:
    events = [*choice(0, *"abcdef"), Chunk(line="[DONE]")]
    blocks = run([(0, event) for event in events[:4]] + [(2, event) for event in events[4:]])
    singles = run(list(enumerate(events, start=1)))
    assert blocks == singles


def test_each_choice_has_one_event_a_tick_until_its_last() -> None:
    first, second = choice(0, "a", "b"), choice(1, "x", "y", "z")
    arrivals = [(0, event) for event in first + second[:1]] + [(4, event) for event in second[1:]]
    arrivals.append((4, Chunk(line="[DONE]")))
    bursts = [burst for _, burst in run(arrivals, choices=2)]
    assert bursts == ["ax", "b<1>", "<1>", "y", "z", "[DONE]"]


def test_a_stream_that_fails_ends_on_a_tick() -> None:
    arrivals = [(0, Chunk(line="a", choice=0)), (3, Chunk(line="error")), (3, Chunk(line="[DONE]"))]
    bursts = run(arrivals)
    assert [burst for _, burst in bursts] == ["a", "<0>", "error", "[DONE]"]
    assert set(gaps(bursts)) == {TICK_S}


def test_a_late_sleeper_never_bunches() -> None:
    bursts = run([(0, event) for event in choice(0, *"abcdefgh")], lateness=(0.0, 0.6, 0.0, 0.3))
    assert [round(gap, 6) for gap in gaps(bursts)][:5] == [0.25, 0.85, 0.25, 0.55, 0.25]


def test_an_error_of_the_source_is_not_swallowed() -> None:
    async def broken() -> AsyncIterator[Chunk]:
        yield Chunk(line="a", choice=0)
        raise RuntimeError("broken")

    async def go() -> list[str]:
        pacer = Pacer(1, filler=str, tick_s=0.0, clock=lambda: 0.0)
        return [burst async for burst in pacer.bursts(broken())]

    with pytest.raises(RuntimeError, match="broken"):
        asyncio.run(go())
