"""What `draftkeep compact` works with: catalog, shards and the log's partitions, opened."""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache

from draftkeep.config import Config
from draftkeep.errors import StoreError
from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.ingest.kafka_group import KafkaGroup
from draftkeep.ingest.kafka_log import KafkaLog
from draftkeep.ingest.kafka_topic_state import require_partitions
from draftkeep.ingest.log import Log
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.store.anchors import ISSUER, read_anchor
from draftkeep.store.catalog import Catalog
from draftkeep.store.compactor import Compactor
from draftkeep.store.compactor_group import CompactorGroup, Round
from draftkeep.store.ownership import claim
from draftkeep.store.storage import Storage, open_storage

_Asked = Callable[[], Collection[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactWork:
    """What is compacted, and by what. `partitions` are this process's, `topic_partitions` all.

    Both may raise StoreError while the brokers cannot be reached.
    """

    config: Config
    catalog: Catalog
    storage: Storage
    compactors: CompactorGroup
    partitions: _Asked
    topic_partitions: _Asked

    def compact(
        self, partitions: _Asked, stopped: Callable[[], bool]
    ) -> tuple[Round, list[StoreError]]:
        """One round over `partitions` and what failed in it."""
        try:
            done = self.compactors.run_round(partitions, stopped=stopped)
        except StoreError as error:
            return Round(), [error]
        return done, done.failures()


@contextmanager
def open_work(config: Config, *, join: bool) -> Iterator[CompactWork]:
    """Open everything; `join` the group of compactors, or take all partitions.

    Raises ConfigError where what is read is not there yet, StoreError where a part cannot be
    reached, and PermanentError where the shards are another catalog's.
    """
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

        compactors, partitions, everything = _source(config, compactor, stack, join=join)
        stack.callback(compactors.close)
        yield CompactWork(
            config=config,
            catalog=catalog,
            storage=storage,
            compactors=compactors,
            partitions=partitions,
            topic_partitions=everything,
        )


def _source(
    config: Config, compactor: Callable[[Log, bool], Compactor], stack: ExitStack, *, join: bool
) -> tuple[CompactorGroup, _Asked, _Asked]:
    """Compactors of the log's partitions, who says which are ours, and which there are."""
    if not config.kafka.servers:
        directory = config.log_path
        embedded = CompactorGroup(lambda _: compactor(SqliteLog.open_reader(directory), True))
        return embedded, lambda: (0,), lambda: (0,)
    kafka, access = config.kafka, KafkaAccess.configured(config.kafka)

    def opened(partition: int) -> Compactor:
        log = KafkaLog(access, kafka.topic, partition=partition, deadline_s=kafka.deadline_s)
        # The upkeep deletes in the topic, and nobody else: it has to see what a crash undid.
        return compactor(log, False)

    def all_partitions() -> tuple[int, ...]:
        with access.admin() as admin:
            return require_partitions(admin, kafka.topic)

    if not join:
        return CompactorGroup(opened), cache(all_partitions), all_partitions
    group = stack.enter_context(KafkaGroup(access, kafka.topic, kafka.group))
    return CompactorGroup(opened, committed=group.commit), group.assigned, all_partitions
