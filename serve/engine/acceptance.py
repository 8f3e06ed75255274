"""Acceptance by depth: how far drafts of one kind of traffic hold."""

from collections.abc import Sequence

_PRIOR_RATE = 0.1
_PRIOR_TESTS = 4.0
# A depth is believed on its own evidence where it has more than this many tests.
_DEPTH_TESTS = 6.0
# Steps of single requests over which evidence is forgotten.
_WINDOW_STEPS = 40.0


class Acceptance:
    """Rolling acceptance of one group of traffic, for every depth of a draft.

    Depth matters: what holds for five tokens is mostly easy text, where the sixth holds more often
    than the first does. Depths with little evidence lean on all depths together, and those on a
    pessimistic prior.
    """

    def __init__(self) -> None:
        self._tested: list[float] = []
        self._accepted: list[float] = []
        self._curve: list[float] = []

    @property
    def tested(self) -> float:
        """Drafts compared lately, older ones counting less."""
        return sum(self._tested)

    @property
    def accepted(self) -> float:
        """Those of them that agreed."""
        return sum(self._accepted)

    def add(self, tested: int, accepted: int) -> None:
        """One request's step: its first `accepted` drafts agreed, of `tested` compared."""
        fade = 1.0 - 1.0 / _WINDOW_STEPS
        self._tested = [value * fade for value in self._tested]
        self._accepted = [value * fade for value in self._accepted]
        while len(self._tested) < tested:
            self._tested.append(0.0)
            self._accepted.append(0.0)
        for depth in range(tested):
            self._tested[depth] += 1.0
            self._accepted[depth] += depth < accepted
        self._curve.clear()

    def expected(self, lookahead: int) -> Sequence[float]:
        """Expected accepted drafts where 0, 1, ... `lookahead` are proposed."""
        if len(self._curve) <= lookahead:
            self._curve = self._expected(lookahead)
        return self._curve[: lookahead + 1]

    def _expected(self, lookahead: int) -> list[float]:
        pooled = (self.accepted + _PRIOR_RATE * _PRIOR_TESTS) / (self.tested + _PRIOR_TESTS)
        curve, holds = [0.0], 1.0
        for depth in range(lookahead):
            tested = self._tested[depth] if depth < len(self._tested) else 0.0
            accepted = self._accepted[depth] if depth < len(self._accepted) else 0.0
            holds *= (accepted + pooled * _DEPTH_TESTS) / (tested + _DEPTH_TESTS)
            curve.append(curve[-1] + holds)
        return curve
