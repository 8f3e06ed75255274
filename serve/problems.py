"""ProblemLog: what goes wrong while a node serves on, logged by kind and never by content."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from draftkeep.errors import DraftkeepError

EVERY_S = 1.0
_log = logging.getLogger(__name__)


class ProblemLog:
    """Logs at most one line a second for each kind, with how many were left out since the last.

    Of an exception only the type is logged: its text may hold anything. Thread-safe. Kinds are
    few and the caller's own words, never a request's.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._next_s: dict[str, float] = {}
        self._held_back: dict[str, int] = {}

    def problem(self, kind: str, error: BaseException) -> None:
        """A part of serving failed with `error` and was given up."""
        self._say(logging.ERROR, f"{kind} failed with {type(error).__name__}")

    def drop(self, reason: str) -> None:
        """A captured trace was lost."""
        self._say(logging.WARNING, f"a trace was dropped: {reason}")

    def _say(self, level: int, message: str) -> None:
        now_s = self._clock()
        with self._lock:
            if now_s < self._next_s.get(message, now_s):
                self._held_back[message] = self._held_back.get(message, 0) + 1
                return
            self._next_s[message] = now_s + EVERY_S
            more = self._held_back.pop(message, 0)
        _log.log(level, "%s%s", message, f" ({more} more since the last line)" if more else "")


def reason_of(error: Exception) -> str:
    """What a log may say of an error: only those raised on purpose are known to hold nothing that
    they should not."""
    if isinstance(error, DraftkeepError):
        return str(error)
    if isinstance(error, OSError):
        name = Path(error.filename).name if isinstance(error.filename, str) else ""
        return f"{type(error).__name__}: {error.strerror} ({name})"
    return type(error).__name__
