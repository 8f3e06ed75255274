"""KafkaWriter: records into a topic, acknowledged by its replicas, with a bound on time and memory.

The client library bounds neither: against a broker that hangs it takes records without end, and
its idempotent producer never recovers from an outage longer than its delivery timeout. So it runs
without idempotence, readers drop duplicates, and deadline, byte budget and rebuild are ours.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kafka import KafkaProducer
from kafka.errors import (
    KafkaError,
    KafkaTimeoutError,
    MessageSizeTooLargeError,
    RecordListTooLargeError,
)

from draftkeep.errors import LogFullError, StoreError
from draftkeep.ingest.kafka_client import KafkaAccess, require_process
from draftkeep.ingest.kafka_topic import MAX_MESSAGE_BYTES

_BATCH_BYTES = 1024**2
_REQUEST_BYTES = 4 * 1024**2
_LINGER_MS = 5
# What one record costs beside its bytes, in the library's objects.
RECORD_COST_BYTES = 512
# The library gives up at the deadline; ours only catches a library that does not.
_LATE_S = 1.0


class _Client:
    """One producer and the bytes that it has not answered for."""

    def __init__(self, access: KafkaAccess, deadline_s: float) -> None:
        deadline_ms = int(deadline_s * 1000)
        self.producer: Any = access.connect(
            KafkaProducer,
            enable_idempotence=False,
            acks="all",
            batch_size=_BATCH_BYTES,
            max_request_size=_REQUEST_BYTES,
            linger_ms=_LINGER_MS,
            max_block_ms=deadline_ms,
            delivery_timeout_ms=deadline_ms,
            request_timeout_ms=deadline_ms * 8 // 10,
            allow_auto_create_topics=False,
        )
        self._pending_bytes = 0
        self._lock = threading.Lock()

    def reserve(self, bytes_: int, budget_bytes: int) -> bool:
        """Count `bytes_` as pending, unless they and others exceed the budget."""
        with self._lock:
            if self._pending_bytes and self._pending_bytes + bytes_ > budget_bytes:
                return False
            self._pending_bytes += bytes_
            return True

    def release(self, bytes_: int) -> None:
        """They were acknowledged, or failed."""
        with self._lock:
            self._pending_bytes -= bytes_

    def close(self, timeout_s: float) -> None:
        """Let go of everything after `timeout_s`; what was not sent by then fails."""
        try:
            self.producer.close(timeout=timeout_s)
        except KafkaError:
            # It raises where something is still pending, before it ends its thread: that would
            # keep its records and sockets.
            self.producer._sender.force_close()
            with contextlib.suppress(KafkaError):
                self.producer.close(timeout=_LATE_S)


class Sending:
    """Records on their way to the brokers, made by `KafkaWriter.begin`. To be waited for once."""

    def __init__(
        self,
        sent: Sequence[Any],
        refusal: Exception | None,
        *,
        records: int,
        until_s: float,
        settle: Callable[[Exception | None], StoreError | None],
    ) -> None:
        """`sent` are the library's futures of the first of `records`; `refusal` stopped the rest.

        `settle` hears what became of all, and says what to tell.
        """
        self._sent = sent
        self._refusal = refusal
        self._records = records
        self._until_s = until_s
        self._settle = settle

    def wait(self) -> list[int]:
        """The records' offsets once all are acknowledged. Raises StoreError as `append` does."""
        error: Exception | None = self._refusal
        offsets: list[int] = []
        for future in self._sent:
            left_s = max(0.0, self._until_s - time.monotonic())
            try:
                offsets.append(future.get(timeout=left_s).offset)
            except Exception as reason:
                error = error or reason
        problem = self._settle(error)
        if problem is not None:
            raise problem from error
        return offsets

    def unacknowledged(self) -> list[int]:
        """Which records have no acknowledgement, by their place; to be asked after `wait`."""
        lost = [index for index, one in enumerate(self._sent) if not one.succeeded()]
        return [*lost, *range(len(self._sent), self._records)]


class KafkaWriter:
    """Appends to one topic. Every method may be called from any thread, and no forked process.

    Acknowledged means written by every replica that is in sync, and at least by as many as the
    topic's `min.insync.replicas` says. At most `budget_bytes` wait for an acknowledgement.
    """

    def __init__(
        self, access: KafkaAccess, topic_name: str, *, budget_bytes: int, deadline_s: float
    ) -> None:
        """Connects with the first append, so that a node starts without its brokers."""
        self._access = access
        self._topic_name = topic_name
        self._budget_bytes = budget_bytes
        self._deadline_s = deadline_s
        self._client: _Client | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()

    def append(
        self,
        records: Sequence[bytes],
        *,
        partition: int | None = None,
        keys: Sequence[bytes] | None = None,
    ) -> list[int]:
        """Write the records and return their offsets once all are acknowledged.

        They go to `partition`, or each to the one that its key says, the same for every repeat.
        In one partition they keep their order and their neighbours unless something had to be
        sent again. Raises LogFullError, before writing, where the budget is used up; StoreError
        after the deadline, or where the brokers refuse, and then any of them may be written.
        """
        return self.begin(records, partition=partition, keys=keys).wait()

    def begin(
        self,
        records: Sequence[bytes],
        *,
        partition: int | None = None,
        keys: Sequence[bytes] | None = None,
    ) -> Sending:
        """Hand the records over and return before they are acknowledged; otherwise as `append`.

        Blocks where there is no connection, or no knowledge of the topic, for the deadline each
        at the most.
        """
        require_process(self._pid)
        client = self._connected()
        if not client.reserve(_cost_bytes(records), self._budget_bytes):
            raise LogFullError(
                f"{self._budget_bytes} bytes already wait for Kafka to acknowledge them; nothing "
                "was written. Check that the brokers answer, or raise the budget"
            )
        with self._lock:
            sent: list[Any] = []
            refusal: Exception | None = None
            try:
                for index, record in enumerate(records):
                    key = None if keys is None else keys[index]
                    sent.append(
                        client.producer.send(self._topic_name, record, key=key, partition=partition)
                    )
            except Exception as error:
                # A fault of the library, too: what was reserved must come back.
                refusal = error
        return Sending(
            sent,
            refusal,
            records=len(records),
            until_s=time.monotonic() + self._deadline_s + _LATE_S,
            settle=lambda error: self._settle(client, records, error),
        )

    def close(self, timeout_s: float | None = None) -> None:
        """Finish what was accepted, within `timeout_s` or else the deadline.

        Harmless when repeated.
        """
        if os.getpid() != self._pid:
            # The connections are the parent's.
            return
        limit_s = self._deadline_s if timeout_s is None else timeout_s
        # Whoever holds the lock longer is connecting, and looks here afterwards.
        self._closed = True
        if not self._lock.acquire(timeout=limit_s):
            return
        client, self._client = self._client, None
        self._lock.release()
        if client is not None:
            client.close(limit_s)

    def _connected(self) -> _Client:
        with self._lock:
            if self._client is None and not self._closed:
                self._client = _Client(self._access, self._deadline_s)
            client = self._client
            if self._closed or client is None:
                self._client = None
                if client is not None:
                    client.close(0)
                raise StoreError("this log is closed; open it again to append")
            return client

    def _settle(
        self, client: _Client, records: Sequence[bytes], error: Exception | None
    ) -> StoreError | None:
        """Take back what the records reserved; after an error, what to tell the caller."""
        client.release(_cost_bytes(records))
        if error is None:
            return None
        if isinstance(error, KafkaTimeoutError) or not isinstance(error, KafkaError):
            self._discard(client)
        if isinstance(error, MessageSizeTooLargeError | RecordListTooLargeError):
            largest = max(len(record) for record in records)
            return StoreError(
                f"topic {self._topic_name} takes no record of {largest} bytes; set its "
                f"max.message.bytes to {MAX_MESSAGE_BYTES} and append again"
            )
        return StoreError(
            f"Kafka did not acknowledge {len(records)} records for topic {self._topic_name} within "
            f"{self._deadline_s:g} s ({type(error).__name__}); any of them may have been "
            "written; sent again they are kept once"
        )

    def _discard(self, client: _Client) -> None:
        """A producer that missed its deadline or is at fault: the next append makes another."""
        with self._lock:
            if self._client is client:
                self._client = None
        client.close(0)


def _cost_bytes(records: Sequence[bytes]) -> int:
    """What they take in memory until they are acknowledged."""
    return sum(len(record) + RECORD_COST_BYTES for record in records)
