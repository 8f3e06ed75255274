"""Compacting from the command line: logs to shards, then everything that removes bytes.

Needs no key. With Kafka `--every` joins a consumer group, and of its members one does the upkeep.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from draftkeep.cli.stopping import stop_event
from draftkeep.cli.upkeep import do_upkeep
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What is compacted, and by what."""

    config: Config
    catalog: Catalog
    storage: Storage
    compactors: CompactorGroup
    partitions: Callable[[], Collection[int]]


def compact_once(config: Config) -> dict[str, Any]:
    """Read every partition to its end, rewrite erased rows, merge, sweep shards and checkpoints.

    Takes all partitions without joining the group: beside compactors that run, whoever commits
    first wins, and nobody's partitions are taken away.
    """
    log_to_stderr(logging.WARNING)
    with _opened(config, join=False) as work:
        done = work.compactors.run_round(work.partitions)
        done.require_success()
        kept = do_upkeep(config, work.catalog, work.storage, clock=time.time)
        return _line(done, kept)


def compact_forever(config: Config, *, every_s: float) -> None:
    """Compact until SIGTERM or Ctrl-C, one line of counts whenever there was something to do."""
    log_to_stderr(logging.WARNING)
    console = Console()
    with stop_event() as stop, ExitStack() as stack:
        work = _wait_for_work(config, stack, console, stop, every_s)
        outage = Outage("compacting")
        while work is not None and not stop.is_set():
            began_s = time.monotonic()
            done, kept = _turn(work, outage, stop, began_s + max(every_s, _ROUND_S))
            line = _line(done, kept)
            if any(line.values()):
                console.print_json(data=line, indent=None)
            # Without a partition yet it has not joined, which takes a moment.
            rest_s = every_s if done.lag else min(every_s, _JOINING_S)
            stop.wait(outage.pause_s or max(0.0, began_s + rest_s - time.monotonic()))


def _turn(
    work: _Work, outage: Outage, stop: threading.Event, limit_s: float
) -> tuple[Round, dict[str, int]]:
    """One round and, where it is this process's turn, the upkeep. A failure is `outage`'s."""
    done = Round()
    kept: dict[str, int] = {}

    def stopped() -> bool:
        return stop.is_set() or time.monotonic() > limit_s

    try:
        done = work.compactors.run_round(work.partitions, stopped=stopped)
        if does_upkeep(work.partitions()) and not stop.is_set():
            kept = do_upkeep(work.config, work.catalog, work.storage, clock=time.time)
        done.require_success()
    except LogReplacedError:
        raise
    except StoreError as error:
        outage.failed(str(error), time.monotonic())
    else:
        outage.worked(time.monotonic())
    return done, kept


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

    if not join:
        with access.admin() as admin:
            fixed = require_partitions(admin, kafka.topic)
        return CompactorGroup(opened), lambda: fixed
    group = stack.enter_context(KafkaGroup(access, kafka.topic, kafka.group))
    return CompactorGroup(opened, committed=group.commit), group.assigned
