"""Releases a stream's chunks on a fixed schedule, so that their times do not follow acceptance."""

import asyncio
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable

from draftkeep.serve.http.chunks import Chunk


class Pacer:
    """Turns chunks into bursts, one every `tick_s`: one chunk of every choice that has not ended.

    A choice with nothing to release gets `filler(choice)`. What belongs to the whole stream comes
    last, one a tick. The first burst leaves after one tick. Ticks that a slow reader missed are not
    made up for: its schedule begins anew. What a schedule cannot hide is how many ticks there are.

    `clock` is monotonic seconds and `sleep` waits that long.
    """

    def __init__(
        self,
        choices: int,
        *,
        filler: Callable[[int], str],
        tick_s: float,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._waiting: dict[int, deque[Chunk]] = {index: deque() for index in range(choices)}
        self._trailers: deque[str] = deque()
        self._drained = False
        self._filler = filler
        self._tick_s = tick_s
        self._clock = clock
        self._sleep = sleep

    async def bursts(self, chunks: AsyncIterable[Chunk]) -> AsyncIterator[str]:
        """The lines of every tick, joined. `chunks` is read ahead of the schedule."""
        reader = asyncio.ensure_future(self._read(chunks))
        due_s = self._clock()
        try:
            while not (self._drained and not self._waiting and not self._trailers):
                now_s = self._clock()
                due_s += self._tick_s
                if due_s <= now_s:
                    due_s = now_s + self._tick_s
                await self._sleep(due_s - now_s)
                burst = self._burst()
                if burst:
                    yield burst
            await reader
        finally:
            reader.cancel()
            # A failure that nobody waits for any more must not reach the log as a traceback.
            await asyncio.wait([reader])
            if not reader.cancelled():
                reader.exception()

    async def _read(self, chunks: AsyncIterable[Chunk]) -> None:
        try:
            async for chunk in chunks:
                if chunk.choice is None:
                    self._trailers.append(chunk.line)
                else:
                    self._waiting[chunk.choice].append(chunk)
        finally:
            self._drained = True

    def _burst(self) -> str:
        lines = []
        for choice, waiting in list(self._waiting.items()):
            if waiting:
                chunk = waiting.popleft()
                lines.append(chunk.line)
                if chunk.last:
                    del self._waiting[choice]
            elif self._drained:
                # The stream failed before this choice could end.
                del self._waiting[choice]
            else:
                lines.append(self._filler(choice))
        if not lines and self._trailers:
            lines.append(self._trailers.popleft())
        return "".join(lines)
