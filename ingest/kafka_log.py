"""The log on Apache Kafka: one partition of one topic.

Acknowledged means that the replicas in sync have it. Expiry is the topic's own
(`draftkeep.ingest.kafka_retention`). Offsets are Kafka's: strictly increasing, never used twice.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
from kafka.errors import KafkaError, OffsetOutOfRangeError

from draftkeep.config import KafkaConfig
from draftkeep.errors import StoreError
from draftkeep.ingest.kafka_client import KafkaAccess, require_process, words_of
from draftkeep.ingest.kafka_topic_state import require_topic_id
from draftkeep.ingest.kafka_writer import KafkaWriter
from draftkeep.ingest.log import LogRecord, PartitionId

_FETCH_BYTES = 4 * 1024**2
_FETCH_WAIT_MS = 100
_POLL_MS = 200
_PAUSE_S = 0.1
_DEFAULTS = KafkaConfig()

_T = TypeVar("_T")


class KafkaLog:
    """A `Log` that any number of processes append to and read.

    An append that failed may have written any of its records; those of several processes, and
    those that had to be sent again, may lie between each other. A record that was freed may come
    back when brokers crash within a minute, so freeing is repeated until it holds. A forked child
    opens its own.
    """

    def __init__(
        self,
        access: KafkaAccess,
        topic_name: str,
        *,
        partition: int = 0,
        budget_bytes: int = _DEFAULTS.budget_bytes,
        deadline_s: float = _DEFAULTS.deadline_s,
    ) -> None:
        """Open a topic that exists, remembering which one it is. Raises StoreError without it.

        `deadline_s` bounds every call, `budget_bytes` what appends keep in memory.
        """
        self._access = access
        self._partition = TopicPartition(topic_name, partition)
        self._deadline_s = deadline_s
        self._lock = threading.RLock()
        self._admin: Any = None
        self._consumer: Any = None
        self._pid = os.getpid()
        # What was fetched and not yet given out, and the position at which it starts.
        self._fetched: deque[LogRecord] = deque()
        self._fetched_from = 0
        self._writer = KafkaWriter(
            access, topic_name, budget_bytes=budget_bytes, deadline_s=deadline_s
        )
        self._closed = False
        try:
            cluster = self._reach(lambda admin: str(admin.describe_cluster()["cluster_id"]))
            self._identity = PartitionId(
                cluster=cluster, topic_id=self._topic_id(), partition=partition
            )
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        """The topic's name."""
        return str(self._partition.topic)

    def append(self, records: Sequence[bytes]) -> int:
        """See `Log.append`; others' records may lie between these, and all or none is not kept."""
        if not records:
            self._check_open()
            return self.bounds()[1]
        return self._writer.append(records, partition=self._partition.partition)[0]

    def read(self, start: int, limit_records: int, limit_bytes: int) -> list[LogRecord]:
        """See `Log.read`. Also raises StoreError where the topic was made again meanwhile."""

        def read(_admin: Any) -> list[LogRecord]:
            following = self._end()
            if start > following:
                raise StoreError(
                    f"reading from offset {start}, but the log ends at {following}: the offset "
                    "belongs to another log, or the topic was made again"
                )
            return self._read(start, following, limit_records, limit_bytes)

        require_process(self._pid)
        with self._lock:
            records = self._reach(read)
            # A topic of the same name is read without a word; its records are not these.
            self._check_identity()
            return records

    def free(self, up_to: int) -> None:
        """Delete the records below `up_to` for every reader of the partition.

        Their bytes leave the disks with their segment. Not safe against a crash of the brokers
        within a minute: repeat it later.
        """

        def free(admin: Any) -> None:
            self._check_identity()
            first, following = self.bounds()
            if up_to > following:
                raise StoreError(f"freeing up to offset {up_to}, but the log ends at {following}")
            if up_to > first:
                admin.delete_records({self._partition: up_to})

        self._reach(free)

    def bounds(self) -> tuple[int, int]:
        """See `Log.bounds`; the end is what all replicas in sync have."""

        def bounds(_admin: Any) -> tuple[int, int]:
            consumer, wait_ms = self._reader(), int(self._deadline_s * 1000)
            first = consumer.beginning_offsets([self._partition], timeout_ms=wait_ms)
            return first[self._partition], self._end()

        return self._reach(bounds)

    def _end(self) -> int:
        wait_ms = int(self._deadline_s * 1000)
        found = self._reader().end_offsets([self._partition], timeout_ms=wait_ms)
        return int(found[self._partition])

    def size_bytes(self) -> int:
        """What the largest replica occupies; freed records count until their segment goes."""
        wanted = {self._partition.topic: [self._partition.partition]}
        brokers = self._reach(lambda admin: admin.describe_log_dirs(wanted))
        return max(
            (
                partition["partition_size"]
                for broker in brokers
                for directory in broker["log_dirs"]
                for topic in directory["topics"]
                for partition in topic["partitions"]
            ),
            default=0,
        )

    def identity(self) -> PartitionId:
        """See `Log.identity`; the topic's id as the brokers say at present.

        One request: what answers at the same address as another cluster has other topics.
        """
        return self._identity._replace(topic_id=self._topic_id())

    def _topic_id(self) -> str:
        return self._reach(lambda admin: require_topic_id(admin, self.name))

    def close(self) -> None:
        """Finish the appends that were accepted and let go of every connection."""
        if os.getpid() != self._pid:
            # The connections are the parent's.
            return
        self._closed = True
        self._writer.close()
        with self._lock:
            self._drop_clients()

    def _read(
        self, start: int, following: int, limit_records: int, limit_bytes: int
    ) -> list[LogRecord]:
        records: list[LogRecord] = []
        taken_bytes, deadline_s = 0, time.monotonic() + self._deadline_s
        self._seek(start)
        while self._fetched_from < following:
            if not self._fetched:
                if time.monotonic() > deadline_s:
                    break
                self._fetch()
                continue
            record = self._fetched[0]
            taken_bytes += len(record.data)
            if records and (len(records) >= limit_records or taken_bytes > limit_bytes):
                return records
            records.append(self._fetched.popleft())
            self._fetched_from = record.offset + 1
        if not records and self._fetched_from < following:
            raise StoreError(
                f"Kafka gave no record from offset {self._fetched_from} on within "
                f"{self._deadline_s:g} s, though there are some up to {following}; check "
                "that the partition's leader answers"
            )
        return records

    def _seek(self, position: int) -> None:
        consumer = self._reader()
        if position != self._fetched_from:
            self._fetched.clear()
            self._fetched_from = position
            consumer.seek(self._partition, position)

    def _fetch(self) -> None:
        """Wait a moment for what comes next; without a record, take note of what held none."""
        consumer = self._reader()
        try:
            polled = consumer.poll(timeout_ms=_POLL_MS)
        except OffsetOutOfRangeError:
            # Freed or expired under our hands.
            position = max(self._fetched_from, self.bounds()[0])
            self._reader().seek(self._partition, position)
            self._fetched_from = position
            return
        for found in polled.get(self._partition, ()):
            self._fetched.append(
                LogRecord(
                    offset=found.offset, data=found.value or b"", appended_s=found.timestamp / 1000
                )
            )
        if not self._fetched:
            # Past the ends of transactions, which take offsets as records do.
            passed = consumer.position(self._partition, timeout_ms=_POLL_MS)
            self._fetched_from = max(self._fetched_from, passed or 0)

    def _reader(self) -> Any:
        if self._consumer is None:
            self._consumer = self._access.connect(
                KafkaConsumer,
                enable_auto_commit=False,
                auto_offset_reset="none",
                allow_auto_create_topics=False,
                fetch_max_wait_ms=_FETCH_WAIT_MS,
                max_partition_fetch_bytes=_FETCH_BYTES,
                request_timeout_ms=int(self._deadline_s * 1000),
            )
            self._consumer.assign([self._partition])
            self._consumer.seek(self._partition, 0)
            self._fetched_from = 0
        return self._consumer

    def _check_identity(self) -> None:
        found = self.identity()
        if found != self._identity:
            raise StoreError(
                f"topic {self._partition.topic} has id {found.topic_id}, expected "
                f"{self._identity.topic_id}: it was deleted and made again; open the log again to "
                "use the one that is there"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("this log is closed; open it again")

    def _reach(self, ask: Callable[[Any], _T]) -> _T:
        """What `ask` gets from the admin client; asked again, by new clients, until the deadline.

        Raises StoreError then, and at once for what no repeat can mend.
        """
        require_process(self._pid)
        deadline_s = time.monotonic() + self._deadline_s
        with self._lock:
            while True:
                self._check_open()
                try:
                    return ask(self._admin_client())
                except KafkaError as error:
                    self._drop_clients()
                    if not error.retriable or time.monotonic() > deadline_s:
                        raise StoreError(
                            f"topic {self._partition.topic} cannot be reached "
                            f"({type(error).__name__}: {words_of(error)}); check that the "
                            "brokers answer"
                        ) from error
                time.sleep(_PAUSE_S)

    def _admin_client(self) -> Any:
        if self._admin is None:
            self._admin = self._access.connect(
                KafkaAdminClient, request_timeout_ms=int(self._deadline_s * 1000)
            )
        return self._admin

    def _drop_clients(self) -> None:
        self._fetched.clear()
        for client in (self._admin, self._consumer):
            if client is not None:
                with contextlib.suppress(KafkaError):
                    client.close()
        self._admin = self._consumer = None
