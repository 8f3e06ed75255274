"""Errands: calls that may wait long for others, beside the event loop."""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


class Errands:
    """Each call runs in a thread of its own that ends with the process, however long it waits.

    A pool's threads would keep the event loop and the process from their end.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: set[threading.Thread] = set()

    async def run(self, call: Callable[[], T]) -> T:
        """What the call returns or raises. Where the caller is cancelled, the call goes on."""
        outcome: Future[T] = Future()
        # Whoever is cancelled does not cancel this: there is no way to stop a thread.
        outcome.set_running_or_notify_cancel()

        def work() -> None:
            try:
                outcome.set_result(call())
            except Exception as error:
                outcome.set_exception(error)
            finally:
                with self._lock:
                    self._under_way.discard(threading.current_thread())

        thread = threading.Thread(target=work, name="errand", daemon=True)
        with self._lock:
            self._under_way.add(thread)
        thread.start()
        return await asyncio.wrap_future(outcome)

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of all; False where one is still under way after `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        with self._lock:
            threads = list(self._under_way)
        for thread in threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)
