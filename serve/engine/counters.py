"""Counters: the engine's running totals, added in its thread and read from any."""

import threading
from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """What is counted since start; the one list of counters.

    `steps` are passes of the whole batch, `row_steps` their sum over requests. `tested` and
    `accepted` count drafts compared with the target's token and found equal; `drafted` counts all
    that were proposed. Nothing behind the end of an output counts. `preempted` counts slots taken
    from a running request for a waiting one. `capture_failed` counts requests whose distributions
    were given up, `callback_failed` exceptions raised by the callers' functions, `drafter_failed`
    drafters given up after a failing pass.
    """

    steps: int
    row_steps: int
    prompt_tokens: int
    output_tokens: int
    drafted: int
    tested: int
    accepted: int
    finished: int
    cancelled: int
    failed: int
    preempted: int
    capture_failed: int
    callback_failed: int
    drafter_failed: int


class Counters:
    """`Totals` that grow together. A misspelt name is a KeyError, not a new counter."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = dict.fromkeys((field.name for field in fields(Totals)), 0)

    def add(self, **amounts: int) -> None:
        """Add to several totals at once."""
        with self._lock:
            for name, amount in amounts.items():
                self._totals[name] += amount

    def snapshot(self) -> dict[str, int]:
        """All totals at one moment."""
        with self._lock:
            return dict(self._totals)
