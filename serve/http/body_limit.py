"""An upper bound on request bodies, enforced before anything is parsed."""

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MAX_BODY_BYTES = 4 * 1024 * 1024


class BodyLimit:
    """ASGI middleware: a body over `limit_bytes` is answered with 413, whether announced or not.

    It raises where the body is read, so the app's own handler for HTTPException words the answer.
    """

    def __init__(self, app: ASGIApp, *, limit_bytes: int = MAX_BODY_BYTES) -> None:
        self._app = app
        self._limit_bytes = limit_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        total = _announced(scope)
        counted = 0

        async def bounded() -> Message:
            nonlocal counted
            if total > self._limit_bytes:
                raise self._refusal()
            message = await receive()
            counted += len(message.get("body", b""))
            if counted > self._limit_bytes:
                raise self._refusal()
            return message

        await self._app(scope, bounded, send)

    def _refusal(self) -> HTTPException:
        return HTTPException(
            413, f"the body is larger than {self._limit_bytes} bytes; send a shorter request"
        )


def _announced(scope: Scope) -> int:
    """The Content-Length, 0 where there is none that can be read."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return 0
