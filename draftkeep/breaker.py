"""Circuit breaker: stop trying for a while after repeated failures, longer each time."""


class Breaker:
    """Counts failures in a row; at `threshold` it opens for `pause_s`, doubled up to the maximum.

    After the pause one try is due: its success closes the breaker, its failure opens it again.
    Times are seconds of any one clock. Not thread-safe: the owner holds its own lock.
    """

    def __init__(
        self, *, threshold: int = 5, pause_s: float = 1.0, max_pause_s: float = 60.0
    ) -> None:
        self._threshold = threshold
        self._first_pause_s = pause_s
        self._max_pause_s = max_pause_s
        self._pause_s = pause_s
        self._failures = 0
        self._open_until_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether it opened and no try has gone well since, also while one is due."""
        return self._open_until_s is not None

    @property
    def doubtful(self) -> bool:
        """Whether the last try went wrong."""
        return self._failures > 0

    def wait_s(self, now_s: float) -> float:
        """How long until the next try; 0 when one may be made."""
        if self._open_until_s is None:
            return 0.0
        return max(0.0, self._open_until_s - now_s)

    def succeeded(self) -> None:
        """A try went well: close, and forget the failures and the grown pause."""
        self._failures = 0
        self._pause_s = self._first_pause_s
        self._open_until_s = None

    def failed(self, now_s: float) -> None:
        """A try went wrong. One that had begun before it opened lengthens no pause."""
        self._failures += 1
        if self.wait_s(now_s) > 0:
            return
        if self._failures >= self._threshold:
            self._open_until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, self._max_pause_s)
