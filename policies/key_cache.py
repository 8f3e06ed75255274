"""Keys in memory for a short while, forgotten as soon as anybody erases anything."""

import heapq
import itertools
import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from draftkeep.policies.retention import Clock, read_clock

MAX_AGE_S = 60.0
Value = TypeVar("Value")


class KeyCache(Generic[Value]):
    """Values that live min(60 s, time to their deadline), all dropped on any erasure.

    `erasures` returns the keyring's erasure counter. It is asked at every `get`, so no value is
    returned that an erasure, by any process, had removed before the call. A clock that steps back
    empties the cache. Expired values leave memory at the next call of any method; an idle process
    calls `sweep`. Thread-safe.
    """

    def __init__(self, *, clock: Clock, erasures: Callable[[], int]) -> None:
        self._clock = clock
        self._erasures = erasures
        self._values: dict[Hashable, tuple[float, Value]] = {}
        self._due: list[tuple[float, int, Hashable]] = []
        self._order = itertools.count()
        self._mark = 0
        self._last_s = 0.0
        self._mutex = threading.Lock()

    def sweep(self) -> int:
        """Drop what is expired or erased; returns the erasure counter that `put` asks for."""
        mark, now_s = self._erasures(), read_clock(self._clock)
        with self._mutex:
            if mark > self._mark or now_s < self._last_s:
                self._values.clear()
                self._due.clear()
            self._mark, self._last_s = max(mark, self._mark), now_s
            while self._due and self._due[0][0] <= now_s:
                due_s, _, key = heapq.heappop(self._due)
                entry = self._values.get(key)
                if entry is not None and entry[0] <= due_s:
                    del self._values[key]
        return mark

    def get(self, key: Hashable) -> Value | None:
        """The value under `key` if it is neither expired nor erased."""
        self.sweep()
        return self.peek(key)

    def peek(self, key: Hashable) -> Value | None:
        """The value under `key` as of the last `sweep`; for a caller that has just swept."""
        with self._mutex:
            entry = self._values.get(key)
        return None if entry is None else entry[1]

    def put(self, key: Hashable, value: Value, *, deadline_s: float, mark: int) -> None:
        """Keep a value that was read after `mark = sweep()`.

        Nothing is kept where an erasure came in between: the value may be what was erased.
        """
        now_s = read_clock(self._clock)
        due_s = min(now_s + MAX_AGE_S, deadline_s)
        with self._mutex:
            if mark != self._mark or due_s <= now_s:
                return
            self._values[key] = (due_s, value)
            heapq.heappush(self._due, (due_s, next(self._order), key))
