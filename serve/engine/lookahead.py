"""How many tokens to draft: off, a fixed number, or what measured acceptance and cost make pay.

Under the coupled rule nothing here can reach an output: the lookahead decides only how many passes
the same tokens take. Under rejection it cannot reach the law of one.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from draftkeep.serve.engine.acceptance import Acceptance
from draftkeep.serve.engine.pass_costs import CostTable
from draftkeep.serve.engine.weighing import Weighing, Wish

# Of the time a group decodes plainly, the share that may go into looking whether drafts would
# hold. Reading what a drafter missed meanwhile costs about as much again.
PROBE_SHARE = 0.012
# Of the time it drafts, the share for each of two other lookaheads whose figures have aged.
EXPLORE_SHARE = 0.006
# What a group may spend on looking before it has decoded at all, in plain steps.
FIRST_PROBES = 2.0
_CREDIT_LIMIT = 3.0
_LEAST_PRICE = 0.1
# Drafts that hold more seldom than this are not worth their bookkeeping, however cheap a pass is.
_LEAST_RATE = 0.05
_MAX_GROUPS = 64
# Idle passes at the start may mislead, so a width is soon looked at so often.
_FIRST_LOOKS = 4

Mode = Literal["auto", "fixed", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """The configured mode. `lookahead` is the number in `fixed` and the maximum in `auto`."""

    mode: Mode = "auto"
    lookahead: int = 8

    def __post_init__(self) -> None:
        if self.lookahead < 1:
            raise ValueError(f"lookahead must be at least 1, got {self.lookahead}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationState:
    """What the controller does at the moment and why.

    `acceptance` is the rolling rate over all groups (NaN before the first test); `est_speedup` the
    expected tokens per second of the last plan over those of plain decoding (1 where plain or where
    costs are not measured).
    """

    mode: Mode
    lookahead: int
    acceptance: float
    est_speedup: float
    reason: str


@dataclass(slots=True)
class _Group:
    """One kind of traffic: how its drafts fare, and the plain steps' worth it may spend probing.

    `pending` is the price of a probe whose outcome is not known yet.
    """

    acceptance: Acceptance
    credit: float = FIRST_PROBES
    pending: float = 0.0


@dataclass(slots=True)
class _Look:
    """How often a width was looked at on purpose, and at which pass of its batch the last time."""

    batch: int
    width: int
    times: int = 0
    at: int = 0


class LookaheadController:
    """Chooses the drafts of every row of a step. One per engine, used by its thread alone.

    In `auto` it takes the drafts with the most expected tokens per second: acceptance by group and
    depth, seconds by batch and width, both rolling. Where that is none, a group is still probed
    with single drafts, within `PROBE_SHARE` of its plain time.
    """

    def __init__(self, speculation: Speculation) -> None:
        self.speculation = speculation
        self.target_cost = CostTable()
        self.draft_cost = CostTable()
        self._groups: dict[str, _Group] = {}
        self._looks: dict[tuple[int, int], _Look] = {}
        self._state = self._describe(0, 1.0, "no request has run yet")

    def new_drafter(self) -> None:
        """Forget what was measured of another drafter; every group is probed at its next step."""
        self._groups.clear()
        self.draft_cost = CostTable()

    def observe(self, group: str, tested: int, accepted: int) -> None:
        """Take one row's step: how many drafts were compared and how many of them agreed."""
        if tested:
            known = self._group(group)
            known.acceptance.add(tested, accepted)
            known.pending = 0.0

    def plan(self, wishes: Sequence[Wish], *, running: int, drafter: bool) -> list[int]:
        """Drafts for each of `wishes`, out of `running` rows in the step."""
        mode = self.speculation.mode
        if mode == "off" or not drafter:
            reason = "speculation is off by configuration" if mode == "off" else "no drafter"
            return self._uniform(wishes, 0, reason)
        if mode == "fixed":
            return self._uniform(wishes, self.speculation.lookahead, "fixed by configuration")
        if not any(wish.cap for wish in wishes):
            return [0] * len(wishes)
        if not self.target_cost:
            return self._uniform(wishes, 0, "the cost of a pass is not measured yet")
        if not self.draft_cost:
            return self._uniform(wishes, 1, "the cost of a draft is not measured yet")
        most = self.speculation.lookahead
        weighing = Weighing(
            wishes=wishes,
            running=running,
            curves={w.group: self._group(w.group).acceptance.expected(most) for w in wishes},
            target_cost=self.target_cost,
            draft_cost=self.draft_cost,
        )
        best = self._best(weighing)
        # A pass taken to learn its cost must stay as it is, or it would not be that pass.
        return self._explored(weighing, best) or self._probed(weighing, best)

    def state(self) -> SpeculationState:
        """The last plan and its reason."""
        return self._state

    def _uniform(self, wishes: Sequence[Wish], lookahead: int, reason: str) -> list[int]:
        self._state = self._describe(lookahead, 1.0, reason)
        return [min(lookahead, wish.cap) for wish in wishes]

    def _group(self, name: str) -> _Group:
        if name not in self._groups and len(self._groups) >= _MAX_GROUPS:
            self._groups.pop(next(iter(self._groups)))
        return self._groups.setdefault(name, _Group(acceptance=Acceptance()))

    def _best(self, weighing: Weighing) -> list[int]:
        """The drafts with the highest expected tokens per second.

        Groups draft together from the most accepted one down: for each lookahead and each such
        choice of groups the whole step is weighed.
        """
        wishes, most = weighing.wishes, self.speculation.lookahead
        order = sorted(
            (name for name, curve in weighing.curves.items() if curve[1] >= _LEAST_RATE),
            key=lambda name: -weighing.curves[name][most],
        )
        best = [0] * len(wishes)
        plain = best_speed = weighing.speed(best)
        tried_speed, tried = 0.0, 1
        for included in range(1, len(order) + 1):
            names = set(order[:included])
            caps = [wish.cap if wish.group in names else 0 for wish in wishes]
            for lookahead in range(1, min(most, max(caps, default=0)) + 1):
                drafts = [min(lookahead, cap) for cap in caps]
                speed = weighing.speed(drafts)
                if speed > tried_speed:
                    tried, tried_speed = lookahead, speed
                if speed > best_speed:
                    best, best_speed = drafts, speed
        if any(best):
            self._state = self._describe(max(best), best_speed / plain, "drafting pays")
        else:
            reason = f"drafting does not pay: lookahead {tried} would run at"
            self._state = self._describe(0, 1.0, f"{reason} {tried_speed / plain:.2f} of plain")
        return best

    def _explored(self, weighing: Weighing, drafts: list[int]) -> list[int] | None:
        """Now and then the longest lookahead, or none, in place of the best: their figures age.

        What it is expected to lose is at most `EXPLORE_SHARE` of the passes since that width was
        last timed, and for the first few times about a plain step. None where it is not time.
        """
        if not any(drafts):
            return None
        plain_s = weighing.seconds([0] * len(drafts))
        speed = weighing.speed(drafts)
        for lookahead in (self.speculation.lookahead, 0):
            trial = [
                min(lookahead, wish.cap) if count else 0
                for wish, count in zip(weighing.wishes, drafts, strict=True)
            ]
            if trial == drafts:
                continue
            lost_s = weighing.seconds(trial) - weighing.tokens(trial) / speed
            look = self._look(weighing.running, 1 + max(trial))
            if lost_s <= plain_s * self._allowed(look):
                look.times += 1
                look.at = self.target_cost.passes(look.batch)
                return trial
        return None

    def _look(self, batch: int, width: int) -> _Look:
        return self._looks.setdefault((batch, width), _Look(batch=batch, width=width))

    def _allowed(self, look: _Look) -> float:
        """What this look may lose, in plain steps.

        The drafter may propose less than was planned, so that the width is not timed after all:
        a look counts whether or not it was.
        """
        cost = self.target_cost
        since = cost.passes(look.batch) - look.at
        allowed = EXPLORE_SHARE * min(since, cost.age(look.batch, look.width))
        if look.times < _FIRST_LOOKS and cost.count(look.batch, look.width) <= _FIRST_LOOKS:
            return max(allowed, 1.0)
        return allowed

    def _probed(self, weighing: Weighing, drafts: list[int]) -> list[int]:
        """With one draft each for rows of groups that decode plainly and can afford it."""
        plain_s = weighing.seconds([0] * len(drafts))
        drafting = {wish.group for wish, n in zip(weighing.wishes, drafts, strict=True) if n}
        for name in (name for name in weighing.curves if name not in drafting):
            group = self._group(name)
            # A probe for which the drafter had nothing to propose cost nothing.
            group.credit = min(group.credit + group.pending + PROBE_SHARE, _CREDIT_LIMIT)
            group.pending = 0.0
            trial = [
                min(1, wish.cap) if wish.group == name else count
                for wish, count in zip(weighing.wishes, drafts, strict=True)
            ]
            extra_s = weighing.seconds(trial) - weighing.seconds(drafts)
            price = max(extra_s / plain_s, _LEAST_PRICE)
            if trial != drafts and price <= group.credit:
                group.pending = price
                group.credit -= price
                drafts = trial
        return drafts

    def _describe(self, lookahead: int, speedup: float, reason: str) -> SpeculationState:
        groups = [group.acceptance for group in self._groups.values()]
        tested = sum(group.tested for group in groups)
        accepted = sum(group.accepted for group in groups)
        return SpeculationState(
            mode=self.speculation.mode,
            lookahead=lookahead,
            acceptance=accepted / tested if tested else math.nan,
            est_speedup=speedup,
            reason=reason,
        )
