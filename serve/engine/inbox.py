"""Inbox: what other threads ask of the engine, taken between two steps."""

import threading
from collections import deque
from collections.abc import Set
from dataclasses import dataclass

from draftkeep.errors import BusyError, InputError, UnavailableError
from draftkeep.serve.engine.drafting import Drafter
from draftkeep.serve.engine.request import Request
from draftkeep.serve.engine.row import Row

_PACE_WEIGHT = 0.2
_MAX_RETRY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A place in the line since `queued_s`: a request, with its row where it had a slot before."""

    request: Request
    queued_s: float
    row: Row | None = None


class Inbox:
    """A bounded line of requests beside cancellations, early ends and a drafter to swap in.

    Every method may be called from any thread. A request is known from `put` until `forget`.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._changed = threading.Condition()
        self._queue: deque[Waiting] = deque()
        self._known: set[str] = set()
        self._cancelled: set[str] = set()
        self._ends: dict[str, int] = {}
        self._swap: list[Drafter | None] = []
        self._closed = False
        self._woken = False
        self._pace_s = 0.0
        self._taken_s: float | None = None

    def put(self, waiting: Waiting) -> None:
        """Queue a request.

        BusyError where the queue is full, UnavailableError once it was closed, InputError for an id
        in use.
        """
        with self._changed:
            if self._closed:
                raise UnavailableError(
                    "the engine is stopping and takes no request; ask another node"
                )
            if len(self._queue) >= self._limit:
                raise BusyError(
                    f"{self._limit} requests are waiting already; repeat the request later",
                    retry_after_s=min(max(1.0, self._pace_s), _MAX_RETRY_S),
                )
            if waiting.request.request_id in self._known:
                raise InputError("a request with this id is running; choose another id")
            self._known.add(waiting.request.request_id)
            self._queue.append(waiting)
            self._changed.notify_all()

    def put_back(self, row: Row, now_s: float) -> None:
        """Queue a request that gave its slot up; it is known already and never refused."""
        with self._changed:
            self._queue.append(Waiting(request=row.request, queued_s=now_s, row=row))

    def cancel(self, request_id: str) -> None:
        """Ask for a request to be dropped; unknown ids are ignored."""
        with self._changed:
            if request_id in self._known:
                self._cancelled.add(request_id)
                self._changed.notify_all()

    def end(self, request_id: str, length: int) -> None:
        """Ask for a request to end after `length` output tokens; unknown ids are ignored."""
        with self._changed:
            if request_id in self._known:
                self._ends[request_id] = min(length, self._ends.get(request_id, length))
                self._changed.notify_all()

    def swap(self, drafter: Drafter | None) -> None:
        """Leave a drafter for the next step; the last one left wins."""
        with self._changed:
            self._swap = [drafter]
            self._changed.notify_all()

    def take_swap(self) -> list[Drafter | None]:
        """The drafter left, as a list of one, or an empty list."""
        with self._changed:
            swap, self._swap = self._swap, []
            return swap

    def take(self, now_s: float) -> Waiting | None:
        """Whoever has waited longest, or None."""
        with self._changed:
            if not self._queue:
                self._taken_s = None
                return None
            if self._taken_s is not None:
                self._pace_s += _PACE_WEIGHT * (now_s - self._taken_s - self._pace_s)
            self._taken_s = now_s
            return self._queue.popleft()

    def oldest_s(self) -> float | None:
        """Since when the first in line has waited, or None."""
        with self._changed:
            return self._queue[0].queued_s if self._queue else None

    def take_cancelled(self) -> tuple[set[str], list[Waiting]]:
        """Ids to drop since the last call, and those of them that were in the line."""
        with self._changed:
            cancelled, self._cancelled = self._cancelled, set()
            return cancelled, self._leave(cancelled)

    def take_ended(self) -> list[tuple[Row, int]]:
        """Rows that were in the line when they were asked to end, and at which length."""
        with self._changed:
            parked = {place.request.request_id for place in self._queue if place.row is not None}
            return [
                (place.row, self._ends[place.request.request_id])
                for place in self._leave(parked & self._ends.keys())
                if place.row is not None
            ]

    def _leave(self, ids: Set[str]) -> list[Waiting]:
        left = [place for place in self._queue if place.request.request_id in ids] if ids else []
        if left:
            self._queue = deque(
                place for place in self._queue if place.request.request_id not in ids
            )
        return left

    def end_of(self, request_id: str) -> int | None:
        """The length at which this request was asked to end, or None."""
        with self._changed:
            return self._ends.get(request_id)

    def forget(self, request_id: str) -> None:
        """The request is over; its id may be used again."""
        with self._changed:
            self._known.discard(request_id)
            self._cancelled.discard(request_id)
            self._ends.pop(request_id, None)

    def close(self) -> list[Waiting]:
        """Refuse everything from here on and return what was queued."""
        with self._changed:
            self._closed = True
            left, self._queue = list(self._queue), deque()
            return left

    def wake(self) -> None:
        """End the present `wait`, or the next one where nobody waits."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Sleep until something is asked, or the time is over."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._queue or self._cancelled or self._swap or self._closed or self._woken,
                timeout_s,
            )
            self._woken = False

    @property
    def known(self) -> int:
        """How many requests were put and are not forgotten."""
        return len(self._known)

    @property
    def leaving(self) -> int:
        """How many of the known are asked to be dropped or to end, and still here."""
        with self._changed:
            return len(self._cancelled | self._ends.keys())

    def __len__(self) -> int:
        return len(self._queue)
