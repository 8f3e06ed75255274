"""DropReporter: a node's counts of lost traces, brought into the catalog for the audit."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

from draftkeep.outage import Outage
from draftkeep.serve.capture import Capture
from draftkeep.serve.problems import reason_of
from draftkeep.store.catalog import Catalog
from draftkeep.store.drops import add_drops, drop_totals

_log = logging.getLogger(__name__)


class DropReporter:
    """Adds the growth of a node's drop counts to the catalog. Failing to is logged and harmless:
    the next try adds what is not there yet. Nobody else writes counts of this node's name."""

    def __init__(
        self, capture: Capture, catalog: Catalog, *, node: str, clock: Callable[[], float]
    ) -> None:
        self._capture = capture
        self._catalog = catalog
        self._node = node
        self._clock = clock
        self._reported: Counter[str] = Counter()
        # What the catalog held before the first report of this process.
        self._before: Counter[str] | None = None
        self._outage = Outage("writing down what was dropped")

    def report(self) -> None:
        """Write what has been dropped since the last successful report. Never raises."""
        counts = Counter(self._capture.drops())
        if not counts - self._reported:
            return
        try:
            with self._catalog.begin() as connection:
                written = drop_totals(connection, self._node)
                if self._before is None:
                    self._before = written
                # A commit that failed may have happened all the same.
                grown = self._before + counts - written
                add_drops(connection, self._node, grown, self._clock())
        except Exception as error:
            self._outage.failed(reason_of(error), time.monotonic())
        else:
            self._reported = counts
            self._outage.worked(time.monotonic())

    def report_last(self, timeout_s: float) -> bool:
        """As `report`, for `timeout_s` at most; what is not written down by then is logged.

        False where it is still under way.
        """
        reporting = threading.Thread(target=self.report, name="last report", daemon=True)
        reporting.start()
        reporting.join(timeout_s)
        left = Counter(self._capture.drops()) - self._reported
        if left:
            _log.warning("what was dropped and is not written down: %s", dict(left))
        return not reporting.is_alive()
