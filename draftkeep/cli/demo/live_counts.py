"""What the server counted per domain while something ran, kept across restarts of the server."""

import json
import time
from collections import Counter
from pathlib import Path
from types import TracebackType

from draftkeep.cli.demo.traffic import Endpoint
from draftkeep.errors import DraftkeepError
from draftkeep.files import write_file

Groups = dict[str, dict[str, int]]

_SETTLES = 300
_PAUSE_S = 0.1


class LiveCounts:
    """A context manager: `totals` is the growth of the server's counters, per domain.

    It ends once all that was captured is in the server's log, at most half a minute later: an
    answer leaves before it is counted, and is counted before it is captured.
    A round that was interrupted finds its earlier counts in `path` and adds to them.
    """

    def __init__(self, endpoint: Endpoint, path: Path) -> None:
        self._endpoint = endpoint
        self._path = path
        self.totals: Groups = json.loads(path.read_text()) if path.exists() else {}

    def __enter__(self) -> "LiveCounts":
        self._before = self._read()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            counted = self._read()
        except DraftkeepError:
            if kind is None:
                raise
            return  # the server is gone; the error under way says more than this one
        for domain, counts in counted.items():
            grown = Counter(counts)
            grown.subtract(self._before.get(domain, {}))
            self.totals[domain] = dict(grown + Counter(self.totals.get(domain, {})))
        write_file(self._path, json.dumps(self.totals).encode())

    def _read(self) -> Groups:
        with self._endpoint.client() as client:
            for _ in range(_SETTLES):
                stats = self._endpoint.admin(client, "GET", "/admin/stats")
                if stats["capture"]["pending"] == 0:
                    break
                time.sleep(_PAUSE_S)
        groups: Groups = stats["groups"]
        return groups
