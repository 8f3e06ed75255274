"""Weighing: what a step would give and cost with any number of drafts for each row."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftkeep.serve.engine.pass_costs import CostTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One row that could draft: its traffic group and the most drafts its budget allows."""

    group: str
    cap: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighing:
    """The expectations of one step of `running` rows, of which `wishes` could draft.

    `curves` holds the expected accepted drafts of every group for 0, 1, ... proposed ones.
    """

    wishes: Sequence[Wish]
    running: int
    curves: Mapping[str, Sequence[float]]
    target_cost: CostTable
    draft_cost: CostTable

    def tokens(self, drafts: Sequence[int]) -> float:
        """Expected tokens of the step."""
        return self.running + sum(
            self.curves[wish.group][count] for wish, count in zip(self.wishes, drafts, strict=True)
        )

    def seconds(self, drafts: Sequence[int]) -> float:
        """Expected seconds of the step."""
        longest = max(drafts, default=0)
        seconds = self.target_cost.estimate(self.running, 1 + longest)
        for depth in range(longest):
            seconds += self.draft_cost.estimate(sum(count > depth for count in drafts), 1)
        return seconds

    def speed(self, drafts: Sequence[int]) -> float:
        """Expected tokens per second."""
        return self.tokens(drafts) / self.seconds(drafts)
