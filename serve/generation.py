"""One choice under way, seen from the event loop: the engine's thread pushes, the loop awaits."""

import asyncio
from collections.abc import AsyncIterator

from draftkeep.errors import DraftkeepError
from draftkeep.serve.delivery import Delivery
from draftkeep.serve.engine import Engine
from draftkeep.serve.request import Finish, Request

CLIENT_GONE = "client_gone"
REQUEST_FAILED = "request_failed"
_Item = tuple[list[int], Finish | None] | DraftkeepError


class Generation:
    """A request in the engine. `start` it, iterate `events`, and `close` it whatever happened.

    `on_tokens` and `on_error` are what the request's callbacks must be. `delivery` is told how it
    ended; None for a request that is not captured.
    """

    def __init__(self, engine: Engine, delivery: Delivery | None) -> None:
        self._engine = engine
        self._delivery = delivery
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[_Item] = asyncio.Queue()
        self._request_id: str | None = None
        self._over = False

    def on_tokens(self, tokens: list[int], finish: Finish | None) -> None:
        """Called in the engine's thread."""
        self._push((tokens, finish))

    def on_error(self, error: DraftkeepError) -> None:
        """Called in the engine's thread."""
        self._abandon(REQUEST_FAILED)
        self._push(error)

    def start(self, request: Request) -> None:
        """Submit; raises what the engine's `submit` raises."""
        try:
            self._engine.submit(request)
        except DraftkeepError:
            self._abandon(REQUEST_FAILED)
            raise
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

    def close(self, *, delivered: bool) -> None:
        """Free the slot if the request still runs, and settle what becomes of its trace.

        `delivered` says that the client was handed the whole answer. The first call counts.
        """
        if self._request_id is not None and not self._over:
            self._over = True
            self._engine.cancel(self._request_id)
            delivered = False
        if not delivered:
            self._abandon(CLIENT_GONE)
        elif self._delivery is not None:
            self._delivery.deliver()

    def _abandon(self, reason: str) -> None:
        if self._delivery is not None:
            self._delivery.abandon(reason)

    def _push(self, item: _Item) -> None:
        # The loop may have closed under a request that was still running at shutdown.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)
