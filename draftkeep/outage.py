"""Outage: what fails is tried again after a growing pause; it is said at once, and now and then."""

import logging

REMIND_S = 300.0

_log = logging.getLogger(__name__)


class Outage:
    """Attempts at `what` that fail in a row, from the first failure to the next success.

    The pause is `first_s`, doubled with every failure up to `longest_s`. The first failure is
    logged as an error, another every REMIND_S while the outage lasts, and its end as a warning.
    Times are seconds of any one clock. For one thread.
    """

    def __init__(self, what: str, *, first_s: float = 1.0, longest_s: float = 30.0) -> None:
        self._what = what
        self._first_s = first_s
        self._longest_s = longest_s
        self._pause_s = 0.0
        self._since_s = self._said_s = 0.0

    @property
    def pause_s(self) -> float:
        """How long to wait before the next attempt; 0 while all is well."""
        return self._pause_s

    def failed(self, reason: str, now_s: float) -> None:
        """An attempt failed, for a reason that may be logged."""
        begins = not self._pause_s
        if begins:
            self._since_s = now_s
        if begins or now_s >= self._said_s + REMIND_S:
            _log.error("%s fails and is tried again: %s", self._what, reason)
            self._said_s = now_s
        self._pause_s = self._first_s if begins else min(2 * self._pause_s, self._longest_s)

    def worked(self, now_s: float) -> None:
        """An attempt went well."""
        if self._pause_s:
            _log.warning("%s works again, after %.0f s", self._what, now_s - self._since_s)
        self._pause_s = 0.0
