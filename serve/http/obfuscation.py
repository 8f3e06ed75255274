"""Padding of stream events, so that their sizes tell little and the same text gives the same sizes.

Timing and the number of events are not this module's: see `pacing`.
"""

import json
from collections.abc import Callable
from typing import Any

BUCKET_BYTES = 256
_FIELD_BYTES = len(',"obfuscation":""')


class Padding:
    """Writes events whose length is a multiple of a bucket, by OpenAI's `obfuscation` field.

    An event that carries log-probabilities for `alternatives` tokens beside the emitted one gets
    room for them, so that one bucket holds nearly every event of a stream. `noise(n)` gives at
    least n random URL-safe characters: a constant would vanish where something compresses.
    """

    def __init__(self, noise: Callable[[int], str], *, alternatives: int | None = None) -> None:
        self._noise = noise
        entries = 0 if alternatives is None else 1 + alternatives
        self.bucket_bytes = BUCKET_BYTES * (1 + entries)

    def line(self, event: dict[str, Any]) -> str:
        """The event as one `data:` line with its blank one, padded."""
        bare = event_line(event)
        missing = -(len(bare) + _FIELD_BYTES) % self.bucket_bytes
        return event_line({**event, "obfuscation": self._noise(missing)[:missing]})


def event_line(event: dict[str, Any]) -> str:
    """A server-sent event. ASCII, so characters are bytes."""
    return f"data: {json.dumps(event, separators=(',', ':'))}\n\n"
