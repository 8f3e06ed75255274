"""DropReporter: a node's counts of lost traces, brought into the catalog for the audit."""

import logging
from collections import Counter
from collections.abc import Callable

from draftkeep.serve.capture import Capture
from draftkeep.serve.problems import reason_of
from draftkeep.store.catalog import Catalog
from draftkeep.store.drops import add_drops

_log = logging.getLogger(__name__)


class DropReporter:
    """Adds the growth of a node's drop counts to the catalog. Failing to is logged and harmless:
    the next try adds it."""

    def __init__(
        self, capture: Capture, catalog: Catalog, *, node: str, clock: Callable[[], float]
    ) -> None:
        self._capture = capture
        self._catalog = catalog
        self._node = node
        self._clock = clock
        self._reported: Counter[str] = Counter()

    def report(self) -> None:
        """Write what has been dropped since the last successful report. Never raises."""
        counts = Counter(self._capture.drops())
        grown = counts - self._reported
        if not grown:
            return
        try:
            with self._catalog.begin() as connection:
                add_drops(connection, self._node, grown, self._clock())
        except Exception as error:
            _log.warning("drops are not in the catalog yet: %s", reason_of(error))
        else:
            self._reported = counts
