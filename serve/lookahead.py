"""How many tokens to draft: off, a fixed number, or what measured acceptance and cost make pay.

Nothing here can reach an output: under the coupled rule the lookahead decides only how many passes
the same tokens take.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

PROBE_EVERY = 16
PROBE_LOOKAHEAD = 2
_PRIOR_RATE = 0.1
_PRIOR_TESTS = 4.0
_WINDOW_TESTS = 200.0
_MIN_RATE = 0.05
_MAX_GROUPS = 64
_COST_WEIGHT = 0.1
_OUTLIER = 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """The configured mode. `lookahead` is the number in `fixed` and the maximum in `auto`."""

    mode: Literal["off", "fixed", "auto"] = "auto"
    lookahead: int = 4

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

    mode: str
    lookahead: int
    acceptance: float
    est_speedup: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """One row that could draft: its traffic group and the most drafts its budget allows."""

    group: str
    cap: int


class CostTable:
    """Seconds of a pass by (batch, width): a moving average where seen, interpolated elsewhere."""

    def __init__(self) -> None:
        self._seconds: dict[int, dict[int, float]] = {}

    def observe(self, batch: int, width: int, seconds: float) -> None:
        """Take one measurement. A single stall moves the average by at most 30 %."""
        row = self._seconds.setdefault(batch, {})
        old = row.get(width)
        if old is None:
            row[width] = seconds
        else:
            row[width] = old + _COST_WEIGHT * (min(seconds, _OUTLIER * old) - old)

    def estimate(self, batch: int, width: int) -> float:
        """Expected seconds, linear between the nearest measurements and level beyond them.

        Raises ValueError where nothing was measured.
        """
        return _between(
            {known: _between(row, width) for known, row in self._seconds.items()}, batch
        )

    def __bool__(self) -> bool:
        return bool(self._seconds)


@dataclass(slots=True)
class _Rate:
    """Accepted over tested drafts of one group, over roughly the last `_WINDOW_TESTS` tests."""

    accepted: float = 0.0
    tested: float = 0.0
    idle_steps: int = PROBE_EVERY

    def add(self, tested: int, accepted: int) -> None:
        self.accepted += accepted
        self.tested += tested
        if self.tested > _WINDOW_TESTS:
            self.accepted *= _WINDOW_TESTS / self.tested
            self.tested = _WINDOW_TESTS

    @property
    def expected(self) -> float:
        """The rate shrunk towards a pessimistic prior."""
        return (self.accepted + _PRIOR_RATE * _PRIOR_TESTS) / (self.tested + _PRIOR_TESTS)


class LookaheadController:
    """Chooses the drafts of every row of a step. One per engine, used by its thread alone."""

    def __init__(self, speculation: Speculation) -> None:
        self.speculation = speculation
        self.target_cost = CostTable()
        self.draft_cost = CostTable()
        self._rates: dict[str, _Rate] = {}
        self._state = self._describe(0, 1.0, "no request has run yet")

    def new_drafter(self) -> None:
        """Forget what was measured of another drafter; every group is probed at its next step."""
        self._rates.clear()
        self.draft_cost = CostTable()

    def observe(self, group: str, tested: int, accepted: int) -> None:
        """Take one row's step: how many drafts were compared and how many of them agreed."""
        if tested:
            self._rate(group).add(tested, accepted)

    def plan(self, wishes: Sequence[Wish], *, running: int, drafter: bool) -> list[int]:
        """Drafts for each of `wishes`, out of `running` rows in the step."""
        mode = self.speculation.mode
        if mode == "off" or not drafter:
            reason = "speculation is off by configuration" if mode == "off" else "no drafter"
            self._state = self._describe(0, 1.0, reason)
            return [0] * len(wishes)
        if mode == "fixed":
            self._state = self._describe(self.speculation.lookahead, 1.0, "fixed by configuration")
            return [min(self.speculation.lookahead, wish.cap) for wish in wishes]
        drafts = self._best(wishes, running)
        self._probe(wishes, drafts)
        return drafts

    def state(self) -> SpeculationState:
        """The last plan and its reason."""
        return self._state

    def _rate(self, group: str) -> _Rate:
        if group not in self._rates and len(self._rates) >= _MAX_GROUPS:
            self._rates.pop(next(iter(self._rates)))
        return self._rates.setdefault(group, _Rate())

    def _best(self, wishes: Sequence[Wish], running: int) -> list[int]:
        """The drafts with the highest expected tokens per second over all lookaheads."""
        if not self.target_cost or not self.draft_cost:
            self._state = self._describe(0, 1.0, "the cost of a pass is not measured yet")
            return [0] * len(wishes)
        rates = [self._rate(wish.group).expected for wish in wishes]
        plain = running / self.target_cost.estimate(running, 1)
        best, best_speed, second_speed, second = [0] * len(wishes), plain, 0.0, 0
        for lookahead in range(1, self.speculation.lookahead + 1):
            drafts = [
                min(lookahead, wish.cap) if rate >= _MIN_RATE else 0
                for wish, rate in zip(wishes, rates, strict=True)
            ]
            speed = self._speed(drafts, rates, running)
            if speed > second_speed:
                second, second_speed = lookahead, speed
            if speed > best_speed:
                best, best_speed = drafts, speed
        if any(best):
            self._state = self._describe(max(best), best_speed / plain, "drafting pays")
        else:
            gain = second_speed / plain
            reason = f"drafting does not pay: lookahead {second} would run at {gain:.2f} of plain"
            self._state = self._describe(0, 1.0, reason)
        return best

    def _speed(self, drafts: Sequence[int], rates: Sequence[float], running: int) -> float:
        """Expected tokens per second of a step with these drafts."""
        tokens = float(running)
        for count, rate in zip(drafts, rates, strict=True):
            tokens += sum(rate**depth for depth in range(1, count + 1))
        seconds = self.target_cost.estimate(running, 1 + max(drafts, default=0))
        for depth in range(max(drafts, default=0)):
            seconds += self.draft_cost.estimate(sum(count > depth for count in drafts), 1)
        return tokens / seconds

    def _probe(self, wishes: Sequence[Wish], drafts: list[int]) -> None:
        """Give a few drafts to rows of a group that has not been tested for a while."""
        drafting = {wish.group for wish, count in zip(wishes, drafts, strict=True) if count}
        for group in {wish.group for wish in wishes}:
            rate = self._rate(group)
            rate.idle_steps = 0 if group in drafting else rate.idle_steps + 1
        due = {group for group, rate in self._rates.items() if rate.idle_steps > PROBE_EVERY}
        for index, wish in enumerate(wishes):
            if wish.group in due and wish.cap:
                drafts[index] = min(PROBE_LOOKAHEAD, wish.cap)
                self._rates[wish.group].idle_steps = 0

    def _describe(self, lookahead: int, speedup: float, reason: str) -> SpeculationState:
        tested = sum(rate.tested for rate in self._rates.values())
        accepted = sum(rate.accepted for rate in self._rates.values())
        return SpeculationState(
            mode=self.speculation.mode,
            lookahead=lookahead,
            acceptance=accepted / tested if tested else math.nan,
            est_speedup=speedup,
            reason=reason,
        )


def _between(points: dict[int, float], at: int) -> float:
    """Piecewise linear through `points`, level outside them."""
    known = sorted(points)
    if not known:
        raise ValueError("no pass has been measured")
    place = bisect_left(known, at)
    if place == len(known):
        return points[known[-1]]
    if place == 0 or known[place] == at:
        return points[known[place]]
    low, high = known[place - 1], known[place]
    share = (at - low) / (high - low)
    return points[low] + share * (points[high] - points[low])
