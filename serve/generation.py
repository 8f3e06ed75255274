"""One choice under way, seen from the event loop: the engine's thread pushes, the loop awaits."""

import asyncio
from collections.abc import AsyncIterator

from draftkeep.errors import DraftkeepError
from draftkeep.serve.engine import Engine
from draftkeep.serve.request import Finish, Request

_Item = tuple[list[int], Finish | None] | DraftkeepError


class Generation:
    """A request in the engine. Iterate `events` to its end, or `cancel`; then forget it.

    `on_tokens` and `on_error` are what the request's callbacks must be.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[_Item] = asyncio.Queue()
        self._request_id: str | None = None
        self._over = False

    def on_tokens(self, tokens: list[int], finish: Finish | None) -> None:
        """Called in the engine's thread."""
        self._push((tokens, finish))

    def on_error(self, error: DraftkeepError) -> None:
        """Called in the engine's thread."""
        self._push(error)

    def start(self, request: Request) -> None:
        """Submit; raises what the engine's `submit` raises."""
        self._engine.submit(request)
        self._request_id = request.request_id

    async def events(self) -> AsyncIterator[tuple[list[int], Finish | None]]:
        """(new tokens, finish) as they come; ends after the one whose finish is not None."""
        while not self._over:
            item = await self._queue.get()
            if isinstance(item, DraftkeepError):
                self._over = True
                raise item
            self._over = item[1] is not None
            yield item

    def cancel(self) -> None:
        """Free the slot if the request still runs; harmless otherwise."""
        if self._request_id is not None and not self._over:
            self._over = True
            self._engine.cancel(self._request_id)

    def _push(self, item: _Item) -> None:
        # The loop may have closed under a request that was still running at shutdown.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
