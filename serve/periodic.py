"""Periodic: something done again and again in a thread of its own."""

import threading
from collections.abc import Callable


class Periodic:
    """Calls `do` every `every_s` seconds from `start` to `stop`; `do` must not raise.

    The thread ends with the process where nobody stops it.
    """

    def __init__(self, name: str, do: Callable[[], None], *, every_s: float) -> None:
        self._do = do
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begin; the first call is `every_s` away."""
        self._thread.start()

    def stop(self) -> None:
        """Call no more; a call under way goes on."""
        self._stop.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end; False where a call is still under way after `timeout_s`."""
        if self._thread.is_alive():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.wait(self._every_s):
            self._do()
