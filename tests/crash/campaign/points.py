"""Places in the production code where a process can be told to die, and where it was when it died.

The functions are wrapped in the child alone. Each gives two places, "in NAME" while it runs and
"after NAME" until the next one is entered. The last place that a process came to stands in its
mark, which outlives it.
"""

import functools
import importlib
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.crash.forking import Child

_STORE = "draftkeep.store"
_INGEST = "draftkeep.ingest"

# By role: module and attribute, patched where it is looked up.
POINTS = {
    "node": (
        "draftkeep.serve.sealing:publish_period",
        f"{_INGEST}.group_writer:GroupWriter._commit",
        f"{_INGEST}.sqlite_log:SqliteLog.append",
    ),
    "forward": (
        f"{_INGEST}.log_reader:LogReader.read",
        f"{_INGEST}.kafka_writer:KafkaWriter.begin",
        f"{_INGEST}.kafka_writer:Sending.wait",
        f"{_INGEST}.log_reader:delete_rows",
        f"{_INGEST}.log_reader:remove_files",
        f"{_INGEST}.log_reader:LogReader.free",
    ),
    "compact": (
        "draftkeep.cli.compact_work:claim",
        f"{_INGEST}.kafka_group:KafkaGroup.assigned",
        f"{_STORE}.compactor:locate",
        f"{_INGEST}.kafka_log:KafkaLog.read",
        f"{_STORE}.compactor:write_shard",
        f"{_STORE}.compactor:advance",
        f"{_STORE}.compactor:add_shard",
        f"{_STORE}.compactor:insert_many",
        f"{_STORE}.compactor:Compactor._store",
        f"{_STORE}.rewriter:_replace",
        f"{_STORE}.log_deletion_round:record_steps",
        f"{_STORE}.log_deletion_round:delete_below",
    ),
    "chores": (
        f"{_STORE}.rewriter:_copy",
        f"{_STORE}.rewriter:write_tables",
        f"{_STORE}.rewriter:lock_shards",
        f"{_STORE}.rewriter:swap_shards",
        f"{_STORE}.rewriter:_replace",
        f"{_STORE}.sweeper:Sweeper._expire",
        f"{_STORE}.sweeper:Sweeper._remove_orphans",
    ),
}


def places(role: str) -> list[str]:
    """What a mark of a process of this role means; 0 is a process that came to no point."""
    names = [point.partition(":")[2] for point in POINTS[role]]
    return ["starting", *(f"{when} {name}" for name in names for when in ("in", "after"))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Aim:
    """Die `delay_s` after coming to a place (an index into `places`) for the `pass_`th time.

    Or stop there, with `freeze`, until somebody lets it go on.
    """

    place: int
    pass_: int
    delay_s: float
    freeze: bool

    def fire(self) -> None:
        """Do it, to the process that asks."""
        time.sleep(self.delay_s)
        os.kill(os.getpid(), signal.SIGSTOP if self.freeze else signal.SIGKILL)


def install(role: str, child: Child) -> None:
    """Wrap the points of a role in this process. Raises where a name is not there."""
    aim = Aim(**child.request["aim"]) if child.request["aim"] else None
    watch = _Watch(child, aim)
    for number, point in enumerate(POINTS[role]):
        patch(point, functools.partial(_watched, watch=watch, place=2 * number + 1))


def patch(point: str, wrap: Callable[[Any], Any]) -> None:
    """Replace what `module:attribute` names by `wrap` of it, in this process."""
    module, _, path = point.partition(":")
    holder: Any = importlib.import_module(module)
    *owners, name = path.split(".")
    for owner in owners:
        holder = getattr(holder, owner)
    setattr(holder, name, wrap(getattr(holder, name)))


class _Watch:
    """Where the process is, and whether that is where it dies."""

    def __init__(self, child: Child, aim: Aim | None) -> None:
        self._mark = child.mark
        self._aim = aim
        self._passes = 0

    def come_to(self, place: int) -> None:
        self._mark[0] = place
        if self._aim is None or self._aim.place != place:
            return
        self._passes += 1
        if self._passes == self._aim.pass_:
            if self._aim.delay_s == 0:
                self._aim.fire()
            else:
                threading.Thread(target=self._aim.fire, daemon=True).start()


def _watched(function: Callable[..., Any], *, watch: _Watch, place: int) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*arguments: Any, **options: Any) -> Any:
        watch.come_to(place)
        try:
            return function(*arguments, **options)
        finally:
            watch.come_to(place + 1)

    return call


def index_of(role: str, aims: Sequence[str]) -> list[int]:
    """The places of this role among aims, which are spelt ROLE: PLACE."""
    known = places(role)
    wanted = [aim.partition(": ")[2] for aim in aims if aim.startswith(f"{role}: ")]
    return [known.index(place) for place in wanted]
