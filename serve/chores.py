"""Chores: what a thread of a node does in rounds, each for itself."""

import time
from collections.abc import Callable, Sequence

from draftkeep.outage import Outage
from draftkeep.serve.periodic import Periodic
from draftkeep.serve.problems import reason_of


class Chores(Periodic):
    """Does every chore, by what it is called in the log, in each round.

    One that fails keeps no other from being done and is tried again in every round; that is said at
    once, now and then, and when it works again.
    """

    def __init__(
        self, name: str, chores: Sequence[tuple[str, Callable[[], object]]], *, every_s: float
    ) -> None:
        super().__init__(name, self.keep, every_s=every_s)
        self._chores = [(chore, Outage(what)) for what, chore in chores]

    def keep(self) -> None:
        """One round. Never raises."""
        for chore, outage in self._chores:
            try:
                chore()
            except Exception as error:
                outage.failed(reason_of(error), time.monotonic())
            else:
                outage.worked(time.monotonic())
