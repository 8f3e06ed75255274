"""Time for tests that must not wait for it."""


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s
