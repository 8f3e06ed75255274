"""RequestLog: one line in the log for each request.

A line tells how a request went: sizes, times, the drafter, what was accepted. It never holds
anything that the request said, nor whom it was about.
"""

import asyncio
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from draftkeep.serve.engine.request import Finished

# The engine reports a choice a moment after its last token has left.
LINGER_S = 0.25
OTHER = "other"
_log = logging.getLogger("draftkeep.requests")


@dataclass(slots=True, kw_only=True)
class Entry:
    """One request from its arrival to its line. `choices` are what the engine finished of it."""

    request_id: str
    method: str
    started_s: float
    route: str = OTHER
    tenant: str | None = None
    status: int = 0
    total_s: float = 0.0
    left: bool = False
    choices: list[Finished] = field(default_factory=list)


class RequestLog:
    """The requests under way, and the lines of those that are over.

    `label` names a drafter by its digest. `finished` is called in the engine's thread, everything
    else in the event loop's.
    """

    def __init__(
        self, *, label: Callable[[bytes], str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._label = label
        self._clock = clock
        self._lock = threading.Lock()
        self._entries: dict[str, Entry] = {}
        self._ended: dict[str, Entry] = {}

    @property
    def in_flight(self) -> int:
        """Requests that have not been answered to the end."""
        with self._lock:
            return len(self._entries) - len(self._ended)

    def begin(self, method: str) -> Entry:
        """A request has arrived; its entry has an id nobody else has."""
        entry = Entry(request_id=secrets.token_hex(16), method=method, started_s=self._clock())
        with self._lock:
            self._entries[entry.request_id] = entry
        return entry

    def finished(self, finished: Finished) -> None:
        """The engine finished a choice; its id begins with the request's."""
        with self._lock:
            entry = self._entries.get(finished.request.request_id.partition("-")[0])
            if entry is not None:
                entry.choices.append(finished)

    def end(self, entry: Entry) -> None:
        """The answer has left, or nobody wants it. The line is written `LINGER_S` later."""
        entry.total_s = self._clock() - entry.started_s
        with self._lock:
            self._ended[entry.request_id] = entry
        asyncio.get_running_loop().call_later(LINGER_S, self._write, entry)

    def flush(self) -> None:
        """Write the lines that still linger."""
        with self._lock:
            ended = list(self._ended.values())
        for entry in ended:
            self._write(entry)

    def _write(self, entry: Entry) -> None:
        with self._lock:
            if self._ended.pop(entry.request_id, None) is None:
                return
            del self._entries[entry.request_id]
        # What only looks is not worth a line: probes and scrapes come by the second.
        level = logging.DEBUG if entry.method in ("GET", "HEAD") else logging.INFO
        _log.log(level, "request", extra={"fields": line_of(entry, self._label)})


def line_of(entry: Entry, label: Callable[[bytes], str]) -> dict[str, object]:
    """The fields of a request's line. Of several choices the sums, and the times of the slowest."""
    line: dict[str, object] = {
        "request_id": entry.request_id,
        "route": entry.route,
        "status": entry.status,
        "tenant": entry.tenant,
        "total_ms": _ms(entry.total_s),
    }
    if entry.left:
        line["client_left"] = True
    if not entry.choices:
        return line
    choices = entry.choices
    drafters = {use.digest for choice in choices for use in choice.drafters}
    return line | {
        "domain": choices[0].request.group,
        "choices": len(choices),
        "prompt_tokens": sum(
            len(choice.request.prompt_ids) for choice in choices if choice.request.choice == 0
        ),
        "output_tokens": sum(len(choice.output_ids_T) for choice in choices),
        "finish": sorted({choice.finish.name.lower() for choice in choices}),
        "queue_ms": _ms(max(choice.started_s - choice.submitted_s for choice in choices)),
        "first_token_ms": _ms(max(choice.first_s - choice.submitted_s for choice in choices)),
        "drafters": sorted(label(digest) for digest in drafters),
        "steps": sum(choice.steps for choice in choices),
        "drafts_tested": sum(choice.tested for choice in choices),
        "drafts_accepted": sum(choice.accepted for choice in choices),
    }


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 1)
