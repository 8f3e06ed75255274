"""Compacting from the command line: logs to shards, then everything that removes bytes.

Needs no key. With Kafka `--every` joins a consumer group, and of its members one does the upkeep.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from rich.console import Console

from draftkeep.cli.stopping import stop_event
from draftkeep.cli.upkeep import UpkeepReport, do_upkeep
from draftkeep.config import Config
from draftkeep.errors import ConfigError, LogReplacedError, StoreError
from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.ingest.kafka_group import KafkaGroup
from draftkeep.ingest.kafka_log import KafkaLog
from draftkeep.ingest.kafka_topic_state import require_partitions
from draftkeep.ingest.log import Log
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.outage import Outage
from draftkeep.serve.logs import log_to_stderr
from draftkeep.store.anchors import ISSUER, read_anchor
from draftkeep.store.catalog import Catalog
from draftkeep.store.compactor import Compactor
from draftkeep.store.compactor_group import CompactorGroup, Round, does_upkeep, totals
from draftkeep.store.ownership import claim
from draftkeep.store.storage import Storage, open_storage

# A round ends after so long (or `--every`, where that is more), so that a backlog keeps nobody
# from the upkeep.
_ROUND_S = 60.0
_JOINING_S = 1.0
# Well below the time after which a member that is busy loses its partitions.
_UPKEEP_S = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What is compacted, and by what."""

    config: Config
    catalog: Catalog
    storage: Storage
    compactors: CompactorGroup
    partitions: Callable[[], Collection[int]]

    def compact(self, stopped: Callable[[], bool]) -> tuple[Round, list[StoreError]]:
        """One round and what failed in it."""
        try:
            done = self.compactors.run_round(self.partitions, stopped=stopped)
        except StoreError as error:
            return Round(), [error]
        return done, done.failures()


def compact_once(config: Config) -> dict[str, Any]:
    """Read every partition to its end, and do the upkeep whether that went well or not.

    Takes all partitions without joining the group: beside compactors that run, whoever commits
    first wins, and nobody's partitions are taken away. Raises StoreError with what failed.
    """
    log_to_stderr(logging.WARNING)
    with _opened(config, join=False) as work:
        done, failures = work.compact(lambda: False)
        kept = do_upkeep(config, work.catalog, work.storage, clock=time.time)
        for failure in [*failures, *kept.failures]:
            raise failure
        return _line(done, kept.counts)


def compact_forever(config: Config, *, every_s: float) -> None:
    """Compact until SIGTERM or Ctrl-C, one line of counts whenever there was something to do."""
    log_to_stderr(logging.WARNING)
    console = Console()
    with stop_event() as stop, ExitStack() as stack:
        work = _wait_for_work(config, stack, console, stop, every_s)
        turns = None if work is None else _Turns(work, stop)
        while turns is not None and not stop.is_set():
            began_s = time.monotonic()
            done, kept = turns.take(began_s + max(every_s, _ROUND_S))
            line = _line(done, kept.counts)
            if any(line.values()):
                console.print_json(data=line, indent=None)
            turns.settle(kept)
            # Without a partition yet it has not joined, which takes a moment.
            rest_s = every_s if done.lag else min(every_s, _JOINING_S)
            stop.wait(turns.pause_s or max(0.0, began_s + rest_s - time.monotonic()))


class _Turns:
    """Rounds of one process of a group, with the upkeep where that is its turn."""

    def __init__(self, work: _Work, stop: threading.Event) -> None:
        self._work = work
        self._stop = stop
        self._outage = Outage("compacting")
        # The partitions that were last ours; None where none ever was.
        self._had: Collection[int] | None = None

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

        done, failures = self._work.compact(stopped)
        kept = UpkeepReport()
        if self._upkeep_is_ours() and not self._stop.is_set():
            until_s = time.monotonic() + _UPKEEP_S
            kept = do_upkeep(
                self._work.config,
                self._work.catalog,
                self._work.storage,
                clock=time.time,
                stopped=lambda: self._stop.is_set() or time.monotonic() > until_s,
            )
        kept.failures[:0] = failures
        return done, kept

    def _upkeep_is_ours(self) -> bool:
        try:
            mine = self._work.partitions()
        except StoreError:
            # Only the group can tell whose it is, and deadlines do not wait for brokers: so it is
            # whose it was, and that of all who never had a partition.
            return self._had is None or does_upkeep(self._had)
        self._had = mine or self._had
        return does_upkeep(mine)

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


def _wait_for_work(
    config: Config, stack: ExitStack, console: Console, stop: threading.Event, every_s: float
) -> _Work | None:
    """Open everything; None where it was stopped before there was anything to compact."""
    waiting = False
    while not stop.is_set():
        try:
            return stack.enter_context(_opened(config, join=True))
        except ConfigError as error:
            # A compactor may be started before the node that makes what it reads.
            if not waiting:
                console.print(f"waiting: {error}", markup=False)
            waiting = True
        stop.wait(every_s)
    return None


@contextmanager
def _opened(config: Config, *, join: bool) -> Iterator[_Work]:
    issuer_public = read_anchor(config.state_dir, ISSUER)
    with ExitStack() as stack:
        catalog = Catalog.configured(config)
        stack.callback(catalog.close)
        storage = open_storage(config)
        claim(catalog, storage)

        def compactor(log: Log, free: bool) -> Compactor:
            return Compactor(
                log, catalog, storage, clock=time.time, issuer_public=issuer_public, free=free
            )

        compactors, partitions = _source(config, compactor, stack, join=join)
        stack.callback(compactors.close)
        yield _Work(
            config=config,
            catalog=catalog,
            storage=storage,
            compactors=compactors,
            partitions=partitions,
        )


def _source(
    config: Config, compactor: Callable[[Log, bool], Compactor], stack: ExitStack, *, join: bool
) -> tuple[CompactorGroup, Callable[[], Collection[int]]]:
    """Compactors of the log's partitions, and who says which are ours."""
    if not config.kafka.servers:
        directory = config.log_path
        embedded = CompactorGroup(lambda _: compactor(SqliteLog.open_reader(directory), True))
        return embedded, lambda: (0,)
    kafka, access = config.kafka, KafkaAccess.configured(config.kafka)

    def opened(partition: int) -> Compactor:
        log = KafkaLog(access, kafka.topic, partition=partition, deadline_s=kafka.deadline_s)
        # The upkeep deletes in the topic, and nobody else: it has to see what a crash undid.
        return compactor(log, False)

    @cache
    def all_partitions() -> tuple[int, ...]:
        with access.admin() as admin:
            return require_partitions(admin, kafka.topic)

    if not join:
        return CompactorGroup(opened), all_partitions
    group = stack.enter_context(KafkaGroup(access, kafka.topic, kafka.group))
    return CompactorGroup(opened, committed=group.commit), group.assigned
