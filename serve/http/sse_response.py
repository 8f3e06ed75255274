"""Server-sent events, and a streamed answer that always settles its generation, however the client
leaves."""

import json
from collections.abc import AsyncGenerator
from typing import Any

from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from draftkeep.serve.http.generation import Generation

DONE = "data: [DONE]\n\n"
_HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}


def event_line(event: dict[str, Any]) -> str:
    """A server-sent event. ASCII, so characters are bytes."""
    return f"data: {json.dumps(event, separators=(',', ':'))}\n\n"


class SseResponse(StreamingResponse):
    """Server-sent events of one generation.

    A client that leaves ends the iteration at whatever point it has reached, even before its
    first event, so the generation is closed here and not by the iterator.
    """

    def __init__(self, events: AsyncGenerator[str, None], generation: Generation) -> None:
        super().__init__(events, media_type="text/event-stream", headers=_HEADERS)
        self._events = events
        self._generation = generation

    async def stream_response(self, send: Send) -> None:
        """Send every event; the answer counts as delivered when the last one was handed over."""
        await super().stream_response(send)
        self._generation.close(delivered=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._generation.close(delivered=False)
            await self._events.aclose()
