"""SIGTERM and SIGINT as a wish to end, for a command that runs until it is told to."""

import _thread
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


@contextmanager
def stop_event() -> Iterator[threading.Event]:
    """An event that the first SIGTERM or SIGINT sets; the second ends the process as ever."""
    event = threading.Event()
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def stop(_number: int, _frame: FrameType | None) -> None:
        # Not in this thread: it may have been interrupted with the event's own lock in hand.
        _thread.start_new_thread(event.set, ())
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in _SIGNALS:
        signal.signal(number, stop)
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
