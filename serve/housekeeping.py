"""Housekeeper: what a node does for its deadlines and its accounts beside serving."""

from collections.abc import Callable

from draftkeep.policies.keyring import Keyring
from draftkeep.serve.chores import Chores
from draftkeep.serve.drops import DropReporter
from draftkeep.store.catalog import Catalog
from draftkeep.store.periods import publish_periods


class Housekeeper(Chores):
    """Publishes deadlines, unlinks what expired in the log, looks whether the engine still comes
    round, and reports drops.

    Every `every_s` seconds in a thread of its own, so that no engine or drafter can hold it up. A
    catalog can, which is why nothing here is what a key waits for. `keyring` and `expire_log` are
    None where the node has none; `look` logs an engine that stalls.
    """

    def __init__(
        self,
        drops: DropReporter,
        keyring: Keyring | None,
        catalog: Catalog,
        *,
        look: Callable[[], object],
        expire_log: Callable[[], object] | None = None,
        every_s: float,
    ) -> None:
        chores: list[tuple[str, Callable[[], object]]] = []
        if keyring is not None:
            chores.append(
                ("publishing deadlines", lambda: publish_periods(catalog, keyring.periods()))
            )
        if expire_log is not None:
            chores.append(("expiring the log", expire_log))
        chores.append(("looking at the engine", look))
        chores.append(("reporting drops", drops.report))
        super().__init__("housekeeper", chores, every_s=every_s)
