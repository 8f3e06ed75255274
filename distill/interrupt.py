"""SIGINT held back while something must not be cut in half."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt() -> Iterator[Callable[[], bool]]:
    """Hold SIGINT back inside the block; gives a function that tells whether one came.

    It is raised as KeyboardInterrupt when the block ends without another error. Outside the main
    thread, which alone gets signals, nothing is held back.
    """
    came = threading.Event()

    def note(_number: int, _frame: FrameType | None) -> None:
        came.set()

    if threading.current_thread() is not threading.main_thread():
        yield came.is_set
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield came.is_set
    finally:
        # None: a handler that was not installed from Python, which cannot be put back by name.
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
    if came.is_set():
        raise KeyboardInterrupt
