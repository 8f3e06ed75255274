"""How an output token came about and why an output ended: one meaning from engine to trace.

The numbers are part of the body format and never change.
"""

from enum import IntEnum


class How(IntEnum):
    """How an output token came about."""

    ACCEPTED = 0
    CORRECTED = 1
    BONUS = 2
    PLAIN = 3


class Finish(IntEnum):
    """Why the output ended. The final EOS or stop token is part of the output."""

    STOP = 0
    LENGTH = 1
    CANCELLED = 2
