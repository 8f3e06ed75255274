"""KafkaGroup: one process's membership of a Kafka consumer group, for assignment and for lag.

The group says who reads which partition, so that processes share the work and take over from each
other. It fences nothing: a member that was frozen goes on with partitions that others have by
then. Whoever relies on being alone compares and sets a stored offset. Offsets are committed to
Kafka only so that its own tools show how far the group is behind.
"""

import contextlib
import logging
import threading
import time
from types import TracebackType
from typing import Any, Self

from kafka import ConsumerRebalanceListener, KafkaConsumer, TopicPartition
from kafka.coordinator.assignors.range import RangePartitionAssignor
from kafka.structs import OffsetAndMetadata

from draftkeep.errors import StoreError
from draftkeep.ingest.kafka_client import KafkaAccess, words_of
from draftkeep.ingest.kafka_topic_state import no_topic

SESSION_S = 10.0
# How long a member may go without asking for its partitions before others get them.
BUSY_S = 300.0
_METADATA_MS = 30_000
_POLL_MS = 500
_PAUSE_S = 1.0
_LEAVE_MS = 5000

_log = logging.getLogger(__name__)


class _NeverFetch(ConsumerRebalanceListener):  # type: ignore[misc]
    """Pauses what is assigned and gives it a position, before the library asks for one.

    A member reads nothing through this consumer, and a partition without a committed offset must
    not be an error.
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer

    def on_partitions_assigned(self, assigned: Any) -> None:
        """Called by the library while it joins."""
        for partition in assigned:
            self._consumer.seek(partition, 0)
            self._consumer.pause(partition)

    def on_partitions_revoked(self, revoked: Any) -> None:
        """Nothing is held that had to be given up in time."""

    def on_partitions_lost(self, lost: Any) -> None:
        """As when they are revoked."""


class KafkaGroup:
    """A member of `group`, for one topic; its thread takes part until `leave`.

    A thread of its own, because the library (3.0.12) throws a join away that completes between
    two polls and makes the whole group join again: a member that polled between its batches would
    keep the group from ever settling. Others get the partitions SESSION_S after this process was
    last heard of, BUSY_S after it last asked what is its own, and at once when it leaves.
    """

    def __init__(
        self,
        access: KafkaAccess,
        topic_name: str,
        group: str,
        *,
        session_s: float = SESSION_S,
        busy_s: float = BUSY_S,
    ) -> None:
        """Starts to join; never waits for it."""
        self._access = access
        self._topic_name = topic_name
        self._group = group
        self._session_s = session_s
        self._busy_s = busy_s
        self._lock = threading.Lock()
        self._assigned: frozenset[int] = frozenset()
        self._failure: StoreError | None = None
        self._asked_s = time.monotonic()
        # What Kafka is to be told, and what it was told.
        self._offsets: dict[int, int] = {}
        self._told: dict[int, int] = {}
        self._complained = False
        self._leaving = threading.Event()
        self._thread = threading.Thread(target=self._take_part, name="kafka-group", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()

    def assigned(self) -> frozenset[int]:
        """The partitions that are this member's, as far as it knows; none before it has joined.

        Raises StoreError while the brokers cannot be reached or refuse, or there is no such topic;
        it goes on trying.
        """
        with self._lock:
            self._asked_s = time.monotonic()
            if self._failure is not None:
                raise self._failure
            return self._assigned

    def commit(self, partition: int, offset: int) -> None:
        """Have Kafka told that the group has everything below `offset`. Best effort, later."""
        with self._lock:
            self._offsets[partition] = offset

    def leave(self) -> None:
        """Tell Kafka the last offsets and leave, so that others take over at once.

        Returns after a few seconds at the latest. Harmless when repeated.
        """
        self._leaving.set()
        self._thread.join(4 * _LEAVE_MS / 1000)

    def _take_part(self) -> None:
        consumer: Any = None
        while not self._leaving.is_set():
            if time.monotonic() - self._asked_s > self._busy_s:
                self._drop(consumer)
                consumer = None
                self._leaving.wait(_PAUSE_S)
                continue
            try:
                if consumer is None:
                    consumer = self._connect()
                consumer.poll(timeout_ms=_POLL_MS)
                assigned = frozenset(item.partition for item in consumer.assignment())
                self._tell(consumer, assigned)
                # The library waits for a topic that is not there without a word.
                missing = not assigned and not consumer.partitions_for_topic(self._topic_name)
                failure = no_topic(self._topic_name) if missing else None
                with self._lock:
                    self._assigned, self._failure = assigned, failure
            except Exception as error:
                # A fault of the library, too: a member whose thread ended would hold on to
                # partitions in silence. Said first: until then whoever asks what is assigned would
                # hear "nothing" and take it for an answer.
                with self._lock:
                    self._failure = _explain(self._group, error)
                self._drop(consumer)
                consumer = None
                self._leaving.wait(_PAUSE_S)
        self._drop(consumer)

    def _connect(self) -> Any:
        consumer = self._access.connect(
            KafkaConsumer,
            group_id=self._group,
            client_id="draftkeep",
            enable_auto_commit=False,
            auto_offset_reset="none",
            allow_auto_create_topics=False,
            # All that a member knows of a partition is in the catalog: any assignment will do.
            partition_assignment_strategy=[RangePartitionAssignor],
            session_timeout_ms=int(1000 * self._session_s),
            heartbeat_interval_ms=int(1000 * self._session_s / 4),
            max_poll_interval_ms=int(1000 * self._busy_s),
            metadata_max_age_ms=_METADATA_MS,
        )
        consumer.subscribe([self._topic_name], listener=_NeverFetch(consumer))
        return consumer

    def _tell(self, consumer: Any, assigned: frozenset[int]) -> None:
        """Commit what is new of the partitions that are ours; others' would be refused."""
        with self._lock:
            # A partition that comes back later was read by others meanwhile.
            self._offsets = {p: offset for p, offset in self._offsets.items() if p in assigned}
            news = {p: offset for p, offset in self._offsets.items() if self._told.get(p) != offset}
            self._told = self._offsets.copy()
        if news:
            consumer.commit_async(self._message(news), callback=self._answered)

    def _message(self, offsets: dict[int, int]) -> dict[Any, Any]:
        return {
            TopicPartition(self._topic_name, partition): OffsetAndMetadata(offset, "", -1)
            for partition, offset in offsets.items()
        }

    def _answered(self, offsets: Any, answer: Any) -> None:
        """Called by the library within a later poll; `answer` is a response or an exception."""
        if not isinstance(answer, Exception):
            self._complained = False
            return
        for item in offsets:
            self._told.pop(item.partition, None)
        if not self._complained:
            _log.warning(
                "Kafka does not take the offsets of group %s (%s): its own tools show a lag that "
                "is too large. The catalog has the true offsets",
                self._group,
                type(answer).__name__,
            )
        self._complained = True

    def _drop(self, consumer: Any) -> None:
        """Leave, if this is a member."""
        with self._lock:
            last, self._offsets, self._told = self._offsets, {}, {}
            self._assigned = frozenset()
        if consumer is None:
            return
        with contextlib.suppress(Exception):
            # What is under way would be lost with the connection.
            consumer.commit(self._message(last), timeout_ms=_LEAVE_MS)
        with contextlib.suppress(Exception):
            consumer.close(autocommit=False, timeout_ms=_LEAVE_MS)


def _explain(group: str, error: Exception) -> StoreError:
    if isinstance(error, StoreError):
        return error
    return StoreError(
        f"consumer group {group} cannot be joined ({type(error).__name__}: {words_of(error)}); "
        "check that the brokers answer and that this user may read the group"
    )
