"""Erasures, offsets and a topic without a whole deployment around them."""

from dataclasses import dataclass, field

import sqlalchemy as sa
from kafka import KafkaAdminClient, TopicPartition
from kafka.admin import OffsetSpec

from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.ingest.kafka_log import KafkaLog
from draftkeep.ingest.kafka_topic import create_topic
from draftkeep.store import schema
from draftkeep.store.catalog import Catalog
from draftkeep.store.database import insert
from draftkeep.store.log_deletion_round import DeletionReport, Policy, delete_owed_records
from draftkeep.store.log_deletion_rows import read_ledger
from tests.store.erasure_row import insert_erasure

NOW_S = 1_800_000_000.0
TTL_S = 86_400


def add_erasure(catalog: Catalog, number: int, state: str = "done") -> bytes:
    """An erasure that ended at that state; returns its id."""
    erasure = bytes([number]) * 16
    with catalog.begin() as connection:
        insert_erasure(connection, erasure, state=state, planned_s=NOW_S)
    return erasure


@dataclass
class House:
    """A topic of two partitions, a catalog, and a housekeeper on a hand clock."""

    access: KafkaAccess
    name: str
    catalog: Catalog
    now_s: float = NOW_S
    logs: list[KafkaLog] = field(default_factory=list)

    def make(self, replicas: int = 1) -> None:
        """The topic, anew where there is one."""
        with self.access.admin() as admin:
            if self.name in admin.list_topics():
                admin.delete_topics([self.name])
        create_topic(self.access, self.name, partitions=2, replicas=replicas, ttl_s=TTL_S)
        self.close()
        self.logs = [KafkaLog(self.access, self.name, partition=index) for index in range(2)]

    def append(self, partition: int, records: int) -> None:
        self.logs[partition].append([b"record"] * records)

    def commit(self, partition: int, following: int) -> None:
        """Say that a compactor has read up to `following`."""
        cluster, topic_id, _ = self.logs[partition].identity()
        key = {"cluster": cluster, "topic": topic_id, "partition": partition}
        moved = {"next": following, "changed_s": self.now_s, "name": self.name}
        with self.catalog.begin() as connection:
            connection.execute(
                insert(connection, schema.offsets)
                .values(**key, **moved)
                .on_conflict_do_update(index_elements=list(key), set_=moved)
            )

    def round(self, policy: Policy = "erasure", *, after_s: float = 1) -> DeletionReport:
        """One round, `after_s` after the one before."""
        self.now_s += after_s
        return delete_owed_records(
            self.catalog, self.access, self.name, policy=policy, now_s=self.now_s
        )

    def firsts(self) -> list[int]:
        """Where the partitions begin."""
        partitions = [TopicPartition(self.name, index) for index in range(2)]
        with self.access.admin() as admin:
            assert isinstance(admin, KafkaAdminClient)
            found = admin.list_partition_offsets(dict.fromkeys(partitions, OffsetSpec.EARLIEST))
        return [found[key].offset for key in partitions]

    def owed(self) -> list[tuple[int, int, int]]:
        """Request, partition and mark of what is not settled."""
        owed = read_ledger(self.catalog, self.name).owed
        return [(item.request, item.partition_id.partition, item.up_to) for item in owed]

    def outcomes(self) -> list[tuple[int, str | None]]:
        """Partition and outcome of every deletion, in order."""
        row = schema.log_deletions.c
        with self.catalog.read() as connection:
            found = connection.execute(
                sa.select(row.partition, row.outcome).order_by(row.request, row.partition)
            )
            return [(line.partition, line.outcome) for line in found]

    def close(self) -> None:
        for log in self.logs:
            log.close()
        self.logs = []
