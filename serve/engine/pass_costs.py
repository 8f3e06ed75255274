"""CostTable: seconds of one pass by batch and width, learnt from the passes themselves."""

import math
from bisect import bisect_left
from dataclasses import dataclass

_WEIGHT = 0.06
# A slower pass than this many times the average is taken as that slow: a stall says little.
_SLOWEST = 1.5
# A figure that was not seen for so many observations follows the machine through those that were.
_STALE_AFTER = 8
_LEAST_S = 1e-9


@dataclass(slots=True)
class _Node:
    """`seen_at` counts observations of the whole table, `step` those of the node's batch."""

    seconds: float
    count: int
    seen_at: int
    step: int


class CostTable:
    """Seconds of a pass by (batch, width): a moving average where seen, drawn from the nearest
    measurements elsewhere.

    A width that a batch was never seen with takes the shape of the nearest batch that was. Figures
    not seen lately move along with the others, so a machine that becomes slower or a context that
    becomes longer does not favour the widths that are not in use.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, dict[int, _Node]] = {}
        self._observed = 0
        self._steps: dict[int, int] = {}
        self._known: dict[tuple[int, int], float] = {}

    def observe(self, batch: int, width: int, seconds: float) -> None:
        """Take one measurement. A single stall moves the average by at most a quarter."""
        seconds = max(seconds, _LEAST_S)
        self._observed += 1
        step = self._steps[batch] = self._steps.get(batch, 0) + 1
        self._known.clear()
        row = self._nodes.setdefault(batch, {})
        node = row.get(width)
        if node is None:
            row[width] = _Node(seconds=seconds, count=1, seen_at=self._observed, step=step)
            return
        before = node.seconds
        # The first figures are of idle passes, so the first live ones count for more.
        share = max(_WEIGHT, 1.0 / (node.count + 1))
        seconds = min(seconds, _SLOWEST * before)
        node.seconds = before + share * (seconds - before)
        node.count += 1
        node.seen_at, node.step = self._observed, step
        self._carry(node.seconds / before)

    def passes(self, batch: int) -> int:
        """How many passes of this batch were seen."""
        return self._steps.get(batch, 0)

    def age(self, batch: int, width: int) -> int:
        """Passes of this batch since this width was last seen; all of them where it never was."""
        node = self._nodes.get(batch, {}).get(width)
        return self.passes(batch) - (node.step if node is not None else 0)

    def count(self, batch: int, width: int) -> int:
        """How often this very pass was seen, idle passes included."""
        node = self._nodes.get(batch, {}).get(width)
        return node.count if node is not None else 0

    def estimate(self, batch: int, width: int) -> float:
        """Expected seconds, never less than of a narrower pass.

        Raises ValueError where nothing was measured.
        """
        key = (batch, width)
        if key not in self._known:
            if not self._nodes:
                raise ValueError("no pass has been measured")
            narrower = self.estimate(batch, width - 1) if width > 1 else 0.0
            self._known[key] = max(narrower, self._estimate(batch, width))
        return self._known[key]

    def __bool__(self) -> bool:
        return bool(self._nodes)

    def _carry(self, ratio: float) -> None:
        for row in self._nodes.values():
            for node in row.values():
                if self._observed - node.seen_at > _STALE_AFTER:
                    node.seconds *= ratio

    def _estimate(self, batch: int, width: int) -> float:
        if batch in self._nodes:
            return self._within(batch, width)
        return _line({known: self._within(known, width) for known in self._nodes}, batch)

    def _within(self, batch: int, width: int) -> float:
        """One batch's cost at a width, by another batch's shape outside what it was seen with."""
        row = {known: node.seconds for known, node in self._nodes[batch].items()}
        nearest = min(row, key=lambda known: abs(known - width))
        if min(row) <= width <= max(row):
            return _line(row, width)
        shape = self._shape(batch, width, nearest)
        if shape is not None:
            return row[nearest] * _line(shape, width) / _line(shape, nearest)
        return _line(row, width)

    def _shape(self, batch: int, width: int, nearest: int) -> dict[int, float] | None:
        """The seconds by width of the nearest other batch that was seen on both sides."""
        fitting = [
            other
            for other, row in self._nodes.items()
            if other != batch
            and min(row) <= min(width, nearest)
            and max(row) >= max(width, nearest)
        ]
        if not fitting:
            return None
        best = min(fitting, key=lambda other: abs(math.log(other / batch)))
        return {known: node.seconds for known, node in self._nodes[best].items()}


def _line(points: dict[int, float], at: int) -> float:
    """Piecewise linear through `points`; level before them, on with the last rise behind them."""
    known = sorted(points)
    place = bisect_left(known, at)
    if place == 0 or (place < len(known) and known[place] == at):
        return points[known[place]]
    if len(known) == 1:
        return points[known[0]]
    place = min(place, len(known) - 1)
    low, high = known[place - 1], known[place]
    rise = (points[high] - points[low]) / (high - low)
    if at > high:
        return points[high] + max(0.0, rise) * (at - high)
    return points[low] + rise * (at - low)
