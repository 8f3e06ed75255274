"""Delivery: a trace is offered once its request has finished and its client has the answer.

The engine finishes in its own thread and the answer leaves from the event loop, in either order;
whichever is second settles. What a client never got is nobody's to keep.
"""

import threading
from collections.abc import Callable

from draftkeep.serve.engine.request import Finished


class Delivery:
    """The rendezvous of one captured request. Thread-safe; settles exactly once.

    `keep(finished)` or `drop(reason)` runs in the thread that settles, so it must be quick.
    """

    def __init__(self, *, keep: Callable[[Finished], None], drop: Callable[[str], None]) -> None:
        self._keep = keep
        self._drop = drop
        self._lock = threading.Lock()
        self._finished: Finished | None = None
        self._delivered = False
        self._settled = False

    def finish(self, finished: Finished) -> None:
        """The engine is done."""
        with self._lock:
            self._finished = finished
            ready = self._delivered and self._settle()
        if ready:
            self._keep(finished)

    def deliver(self) -> None:
        """The whole answer was handed to the client."""
        with self._lock:
            self._delivered = True
            finished = self._finished
            ready = finished is not None and self._settle()
        if ready and finished is not None:
            self._keep(finished)

    def abandon(self, reason: str) -> None:
        """There will be no answer, or nobody to take it. Harmless once settled."""
        with self._lock:
            ready = not self._delivered and self._settle()
        if ready:
            self._drop(reason)

    def _settle(self) -> bool:
        """True for the first caller."""
        first, self._settled = not self._settled, True
        return first
