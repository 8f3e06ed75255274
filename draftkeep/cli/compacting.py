"""Compacting from the command line: logs to shards, then everything that removes bytes.

Needs no key. With Kafka `--every` joins a consumer group, and of its members one does the upkeep.
"""

import logging
import threading
import time
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any

from rich.console import Console

from draftkeep.cli.compact_work import CompactWork, open_work
from draftkeep.cli.stopping import stop_event
from draftkeep.cli.upkeep import UpkeepReport, do_upkeep
from draftkeep.config import Config
from draftkeep.errors import LogReplacedError, PermanentError, StoreError
from draftkeep.outage import Outage
from draftkeep.serve.logs import log_to_stderr
from draftkeep.store.anchors import ISSUER, awaited
from draftkeep.store.compactor_group import Round, does_upkeep, totals

# A round ends after so long (or `--every`, where that is more), so that a backlog keeps nobody
# from the upkeep.
_ROUND_S = 60.0
_JOINING_S = 1.0
# Well below the time after which a member that is busy loses its partitions.
_UPKEEP_S = 120.0
_log = logging.getLogger(__name__)


def compact_once(config: Config) -> dict[str, Any]:
    """Read every partition to its end, and do the upkeep whether that went well or not.

    Takes all partitions without joining the group: beside compactors that run, whoever commits
    first wins, and nobody's partitions are taken away. Raises StoreError with what failed.
    """
    log_to_stderr(logging.WARNING)
    with open_work(config, join=False) as work:
        done, failures = work.compact(work.partitions, lambda: False)
        kept = do_upkeep(config, work.catalog, work.storage, clock=time.time)
        for failure in [*failures, *kept.failures]:
            raise failure
        return _line(done, kept.counts)


def compact_forever(config: Config, *, every_s: float) -> None:
    """Compact until SIGTERM or Ctrl-C.

    One line of counts whenever there was something to do, without those that are zero. Which
    partitions are this process's is logged whenever it changes. Raises PermanentError for what
    only an operator can mend, and ConfigError; all else is waited for.
    """
    log_to_stderr(logging.WARNING)
    _log.setLevel(logging.INFO)
    console = Console()
    outage = Outage("compacting")
    with stop_event() as stop, ExitStack() as stack:
        work = _wait_for_work(config, stack, stop, outage, every_s)
        turns = None if work is None else _Turns(work, stop, outage)
        while turns is not None and not stop.is_set():
            began_s = time.monotonic()
            done, kept = turns.take(began_s + max(every_s, _ROUND_S))
            line = {name: value for name, value in _line(done, kept.counts).items() if value}
            if line:
                now = datetime.now(UTC).isoformat(timespec="seconds")
                stamp = {"time": now, "partitions": spans(turns.had)}
                console.print_json(data={**stamp, **line}, indent=None)
            turns.settle(kept)
            # Without a partition yet it has not joined, which takes a moment.
            rest_s = every_s if done.lag else min(every_s, _JOINING_S)
            stop.wait(turns.pause_s or max(0.0, began_s + rest_s - time.monotonic()))


class _Turns:
    """Rounds of one process of a group, with the upkeep where that is its turn."""

    def __init__(self, work: CompactWork, stop: threading.Event, outage: Outage) -> None:
        self._work = work
        self._stop = stop
        self._outage = outage
        # The partitions that were last ours; None where none ever was.
        self._had: Collection[int] | None = None
        self._announced: set[int] | None = None

    @property
    def had(self) -> Collection[int]:
        """The partitions that were last ours; none where none ever was."""
        return self._had or ()

    @property
    def pause_s(self) -> float:
        """How long to wait before the next turn for what failed; 0 where nothing did."""
        return self._outage.pause_s

    def take(self, limit_s: float) -> tuple[Round, UpkeepReport]:
        """One round, until `limit_s` of the monotonic clock, and the upkeep after it.

        What failed of both is in the report. Nothing that fails keeps the other from being done.
        """

        def stopped() -> bool:
            return self._stop.is_set() or time.monotonic() > limit_s

        done, failures = self._work.compact(self._mine, stopped)
        kept = UpkeepReport()
        if self._upkeep_is_ours() and not self._stop.is_set():
            until_s = time.monotonic() + _UPKEEP_S
            kept = do_upkeep(
                self._work.config,
                self._work.catalog,
                self._work.storage,
                clock=time.time,
                enough=lambda: time.monotonic() > until_s,
                stopped=self._stop.is_set,
            )
        kept.failures[:0] = failures
        return done, kept

    def _mine(self) -> Collection[int]:
        mine = self._work.partitions()
        self._had = mine or self._had
        if set(mine) != self._announced:
            self._announce(set(mine))
        return mine

    def _announce(self, mine: set[int]) -> None:
        if mine:
            try:
                count = len(self._work.topic_partitions())
            except StoreError:
                # Said with the next batch, then.
                return
            noun = "partition" if len(mine) == 1 else "partitions"
            _log.info("has %s %s of %d", noun, spans(mine), count)
        else:
            _log.info("has no partition; takes part as soon as it is given one")
        self._announced = mine

    def _upkeep_is_ours(self) -> bool:
        try:
            return does_upkeep(self._mine())
        except StoreError:
            # Only the group can tell whose it is, and deadlines do not wait for brokers: so it is
            # whose it was, and that of all who never had a partition.
            return self._had is None or does_upkeep(self._had)

    def settle(self, kept: UpkeepReport) -> None:
        """Say what failed, once. Raises LogReplacedError, for which only an operator has an
        answer."""
        for failure in kept.failures:
            if isinstance(failure, LogReplacedError):
                raise failure
        if kept.failures:
            reasons = dict.fromkeys(str(failure) for failure in kept.failures)
            self._outage.failed("; ".join(reasons), time.monotonic())
        else:
            self._outage.worked(time.monotonic())


def _line(done: Round, kept: Mapping[str, int]) -> dict[str, Any]:
    line: dict[str, Any] = {**totals(done), **kept}
    if line["lost"]:
        line["ALARM"] = f"{line['lost']} offsets were gone before they were compacted"
    return line


def spans(partitions: Collection[int]) -> str:
    """Partitions in few words: `0-3, 6`."""
    found: list[list[int]] = []
    for partition in sorted(partitions):
        if found and partition == found[-1][1] + 1:
            found[-1][1] = partition
        else:
            found.append([partition, partition])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def _wait_for_work(
    config: Config,
    stack: ExitStack,
    stop: threading.Event,
    outage: Outage,
    every_s: float,
) -> CompactWork | None:
    """Open everything; None where it was stopped before there was anything to compact.

    Raises ConfigError and PermanentError, which waiting does not mend.
    """
    waiting = False
    while not stop.is_set():
        # A compactor may be started before the node that makes what it reads.
        if missing := awaited(config.state_dir, ISSUER):
            if not waiting:
                _log.warning("waiting: %s", missing)
            waiting = True
            stop.wait(every_s)
            continue
        try:
            return stack.enter_context(open_work(config, join=True))
        except PermanentError:
            raise
        except StoreError as error:
            outage.failed(str(error), time.monotonic())
        stop.wait(outage.pause_s or every_s)
    return None
