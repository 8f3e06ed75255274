"""How an output token came about and why an output ended: one meaning from engine to trace.

The numbers are part of the body format and never change.
"""

from dataclasses import dataclass, replace
from enum import IntEnum

from draftkeep.kernels.sampling import Sampling


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What one verification step emits.

    `tokens` is at least one. The first `accepted` of them equal their drafts; `tested` counts the
    drafts that were judged, so tested - accepted is 0 or 1. `logprobs` is the log of each token's
    processed probability where the rule is rejection, else None.
    """

    tokens: tuple[int, ...]
    accepted: int
    tested: int
    logprobs: tuple[float, ...] | None = None

    def certain(self) -> "Verified":
        """The same of a greedy step under rejection: its tokens were certain, log-probability 0."""
        return replace(self, logprobs=(0.0,) * len(self.tokens))


def is_end(token: int, sampling: Sampling) -> bool:
    """True where this token ends the output: a stop id, or EOS unless it is ignored."""
    return token in sampling.stop_ids or (token in sampling.eos_ids and not sampling.ignore_eos)
