"""Housekeeper: what a node does for its deadlines and its accounts beside serving."""

import time
from collections.abc import Callable

from draftkeep.outage import Outage
from draftkeep.policies.keyring import Keyring
from draftkeep.serve.drops import DropReporter
from draftkeep.serve.periodic import Periodic
from draftkeep.serve.problems import reason_of
from draftkeep.serve.sealing import PublishingSealer
from draftkeep.store.catalog import Catalog
from draftkeep.store.periods import publish_periods


class Housekeeper:
    """Publishes deadlines, lets the sealer forget what is over, unlinks what expired in the log,
    looks whether the engine still comes round, and reports drops.

    Every `every_s` seconds in a thread of its own, so that no engine, drafter or log can hold it
    up. A chore that fails keeps no other from being done and is tried again in every round; that is
    said at once, now and then, and when it works again.
    `sealer`, `keyring` and `expire_log` are None where the node has none; `look` logs an engine
    that stalls.
    """

    def __init__(
        self,
        drops: DropReporter,
        sealer: PublishingSealer | None,
        keyring: Keyring | None,
        catalog: Catalog,
        *,
        look: Callable[[], object],
        expire_log: Callable[[], object] | None = None,
        every_s: float,
    ) -> None:
        self._chores: list[tuple[str, Callable[[], object]]] = []
        if keyring is not None:
            self._chores.append(
                ("publishing deadlines", lambda: publish_periods(catalog, keyring.periods()))
            )
        if sealer is not None:
            self._chores.append(("sweeping the sealer", sealer.sweep))
        if expire_log is not None:
            self._chores.append(("expiring the log", expire_log))
        self._chores.append(("looking at the engine", look))
        self._chores.append(("reporting drops", drops.report))
        self._outages = {what: Outage(what) for what, _ in self._chores}
        self._rounds = Periodic("housekeeper", self.keep, every_s=every_s)

    def start(self) -> None:
        """Begin."""
        self._rounds.start()

    def stop(self) -> None:
        """Begin no further round."""
        self._rounds.stop()

    def join(self, timeout_s: float) -> bool:
        """Wait for the end of a round under way; False where it goes on after `timeout_s`."""
        return self._rounds.join(timeout_s)

    def keep(self) -> None:
        """One round. Never raises."""
        for what, chore in self._chores:
            try:
                chore()
            except Exception as error:
                self._outages[what].failed(reason_of(error), time.monotonic())
            else:
                self._outages[what].worked(time.monotonic())
