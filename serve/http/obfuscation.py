"""Padding of stream events, so that their sizes tell little and the same text gives the same sizes.

Timing and the number of events are not this module's: see `pacing`.
"""

from collections.abc import Callable
from typing import Any

from draftkeep.serve.http.sse_response import event_line

BUCKET_BYTES = 256
# The widest log-probability: four digits before the point and four behind it.
FLOAT_BYTES = len("-9998.9999")
_FIELD_BYTES = len(',"obfuscation":""')


class Padding:
    """Writes events whose length is a multiple of a bucket, by OpenAI's `obfuscation` field.

    An event that carries log-probabilities for `alternatives` tokens beside the emitted one gets
    room for them, so that one bucket holds nearly every event of a stream. Every number with a
    point counts as the widest one: its last digits are the arithmetic's, and the arithmetic
    depends on how many tokens a pass had. `noise(n)` gives at least n random URL-safe characters: a
    constant would vanish where something compresses.
    """

    def __init__(self, noise: Callable[[int], str], *, alternatives: int | None = None) -> None:
        self._noise = noise
        entries = 0 if alternatives is None else 1 + alternatives
        self.bucket_bytes = BUCKET_BYTES * (1 + entries)

    def line(self, event: dict[str, Any]) -> str:
        """The event as one `data:` line with its blank one, padded."""
        slack = _slack(event)
        missing = -(len(event_line(event)) + slack + _FIELD_BYTES) % self.bucket_bytes + slack
        return event_line({**event, "obfuscation": self._noise(missing)[:missing]})


def _slack(part: Any) -> int:
    """How many bytes its floats fall short of their widest."""
    if isinstance(part, float):
        return max(0, FLOAT_BYTES - len(repr(part)))
    if isinstance(part, dict):
        return sum(map(_slack, part.values()))
    return sum(map(_slack, part)) if isinstance(part, list) else 0
