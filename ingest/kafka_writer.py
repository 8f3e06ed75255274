"""KafkaWriter: records into a topic, acknowledged by its replicas, with a bound on time and memory.

The client library bounds neither: against a broker that hangs it takes records without end, and
its idempotent producer never recovers from an outage longer than its delivery timeout. So it runs
without idempotence, readers drop duplicates, and deadline, byte budget and rebuild are ours.
"""

import contextlib
import threading
from collections.abc import Sequence
from typing import Any

from kafka import KafkaProducer
from kafka.errors import KafkaError, KafkaTimeoutError

from draftkeep.errors import LogFullError, StoreError
from draftkeep.ingest.kafka_client import KafkaAccess

_BATCH_BYTES = 1024**2
_REQUEST_BYTES = 4 * 1024**2
_LINGER_MS = 5
# What one record costs beside its bytes, in the library's objects.
_RECORD_BYTES = 512


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
        # It raises where something was still pending, and again when it is collected.
        with contextlib.suppress(KafkaError):
            self.producer.close(timeout=timeout_s)


class KafkaWriter:
    """Appends to one topic. Every method may be called from any thread.

    Acknowledged means written by every replica that is in sync, and at least by as many as the
    topic's `min.insync.replicas` says. At most `budget_bytes` wait for an acknowledgement.
    """

    def __init__(
        self, access: KafkaAccess, topic: str, *, budget_bytes: int, deadline_s: float
    ) -> None:
        """Connects with the first append, so that a node starts without its brokers."""
        self._access = access
        self._topic = topic
        self._budget_bytes = budget_bytes
        self._deadline_s = deadline_s
        self._client: _Client | None = None
        self._lock = threading.Lock()
        self._closed = False

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
        client = self._connected()
        sizes = [len(record) + _RECORD_BYTES for record in records]
        if not client.reserve(sum(sizes), self._budget_bytes):
            raise LogFullError(
                f"{self._budget_bytes} bytes already wait for Kafka to acknowledge them; nothing "
                "was written. Check that the brokers answer, or raise the budget"
            )
        sent: list[Any] = []
        try:
            with self._lock:
                for index, record in enumerate(records):
                    key = None if keys is None else keys[index]
                    sent.append(
                        client.producer.send(self._topic, record, key=key, partition=partition)
                    )
            # The library gives up at the deadline; ours only catches a library that does not.
            return [future.get(timeout=self._deadline_s + 1).offset for future in sent]
        except KafkaError as error:
            if isinstance(error, KafkaTimeoutError):
                self._discard(client)
            raise StoreError(
                f"Kafka did not acknowledge {len(records)} records for topic {self._topic} within "
                f"{self._deadline_s:g} s ({type(error).__name__}); any of them may have been "
                "written. Append them again: readers drop duplicates"
            ) from error
        finally:
            client.release(sum(sizes))

    def close(self) -> None:
        """Finish what was accepted, for as long as the deadline. Harmless when repeated."""
        with self._lock:
            self._closed, client, self._client = True, self._client, None
        if client is not None:
            client.close(self._deadline_s)

    def _connected(self) -> _Client:
        with self._lock:
            if self._closed:
                raise StoreError("this log is closed; open it again to append")
            if self._client is None:
                self._client = _Client(self._access, self._deadline_s)
            return self._client

    def _discard(self, client: _Client) -> None:
        """A producer that missed its deadline may be stuck: the next append makes another."""
        with self._lock:
            if self._client is client:
                self._client = None
        client.close(0)
