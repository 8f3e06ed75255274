"""Another engine as the serving bench sees it: prompts in, answers and their seconds out."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bench.prompts import Prompt

# What every engine is given, ours too: requests at a time, and the most tokens of one.
SLOTS = 8
CONTEXT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    """Output ids of every prompt, and the seconds of every call."""

    ids: list[list[int]]
    seconds: list[float]

    @property
    def rate(self) -> float:
        """Tokens a second over all calls."""
        return sum(map(len, self.ids)) / sum(self.seconds)


class Peer(Protocol):
    """An engine that runs in a process of its own, for one call of `run`."""

    @property
    def name(self) -> str:
        """For rows and messages."""
        ...

    @property
    def drafts(self) -> bool:
        """Whether it has the drafter too."""
        ...

    def run(self, prompts: Sequence[Prompt], *, draft_tokens: int, together: bool) -> PeerResult:
        """Answer the prompts greedily, one after another or all at once, once warmed up.

        `draft_tokens` is how many tokens it drafts at a time, 0 for none. Raises DraftkeepError
        where it does not start or answer.
        """
        ...
