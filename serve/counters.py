"""Counters: the engine's running totals, added in its thread and read from any."""

import threading


class Counters:
    """Named totals that are read together. A misspelt name is a KeyError, not a new counter."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = dict.fromkeys(
            (
                "steps",
                "row_steps",
                "prompt_tokens",
                "output_tokens",
                "drafted",
                "tested",
                "accepted",
                "finished",
                "cancelled",
                "failed",
                "capture_failed",
                "callback_failed",
                "drafter_failed",
            ),
            0,
        )

    def add(self, **amounts: int) -> None:
        """Add to several totals at once."""
        with self._lock:
            for name, amount in amounts.items():
                self._totals[name] += amount

    def snapshot(self) -> dict[str, int]:
        """All totals at one moment."""
        with self._lock:
            return dict(self._totals)
