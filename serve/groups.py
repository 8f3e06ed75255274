"""What finished requests of each kind got. Labels are a tenant's configured domains."""

import threading
from collections import Counter

from draftkeep.serve.engine.request import Finished

FIELDS = ("requests", "output_tokens", "steps", "tested", "accepted")


class GroupCounts:
    """Counters by request group, since start. Thread-safe.

    Counts a request whole, when it has finished, and up to its end: of one that was cancelled or
    lost nothing is here, and of one that was ended early no step behind the end. `Metrics` counts
    by the same labels what the engine did, step by step, for whatever became of the request. Only
    these counts belong to as many `requests`, and so give a request's own rates.

    `tested` and `accepted` are drafts compared with the target's own token and found equal: their
    ratio is the live acceptance rate. `output_tokens` / `steps` is tokens per step.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: dict[str, Counter[str]] = {}

    def add(self, finished: Finished) -> None:
        """Count one finished request."""
        values = (
            1,
            len(finished.output_ids_T),
            finished.steps,
            finished.tested,
            finished.accepted,
        )
        with self._lock:
            group = self._groups.setdefault(finished.request.group, Counter())
            group.update(dict(zip(FIELDS, values, strict=True)))

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Every group's counters, every field present."""
        with self._lock:
            return {
                name: {field: counts[field] for field in FIELDS}
                for name, counts in self._groups.items()
            }
