"""TrackRequests: what happens to every request before its route and after its answer."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draftkeep.serve.request_log import OTHER, Entry


class TrackRequests:
    """ASGI middleware: every request gets an id, a line in the log and a place in the counts.

    The id is in the answer's `x-request-id` and, for the routes, in `request.state.request_id`; the
    node, or None while it is being loaded, in `request.state.node`. Requests that come while it is
    being loaded are not tracked.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # One answer for the whole request, which may outlast the loading.
        node = scope.setdefault("state", {})["node"] = scope["app"].state.node
        if node is None:
            await self._app(scope, receive, send)
            return
        entry: Entry = node.requests.begin(scope["method"])
        scope["state"]["request_id"] = entry.request_id
        over = False

        async def watched() -> Message:
            message = await receive()
            entry.left |= message["type"] == "http.disconnect" and not over
            return message

        async def marked(message: Message) -> None:
            nonlocal over
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = entry.request_id
            await send(message)
            over = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            await self._app(scope, watched, marked)
        except Exception:
            entry.status = entry.status or 500
            raise
        finally:
            # Nothing was sent: the request was given up, by its client or by the node's end.
            entry.status = entry.status or 499
            entry.route = _route(scope)
            entry.tenant = scope["state"].get("tenant")
            node.metrics.http(entry.route, entry.status)
            node.requests.end(entry)


def _route(scope: Scope) -> str:
    """The pattern of the route that answered; a path as it was asked for is nobody's label."""
    route = scope.get("route")
    path: object = getattr(route, "path", OTHER)
    return path if isinstance(path, str) else OTHER
