"""Traces emitted at a steady rate while a forwarder moves them, and the count of what arrived."""

import math
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from kafka import KafkaConsumer, TopicPartition

from draftkeep.breaker import Breaker
from draftkeep.errors import StoreError
from draftkeep.ingest.emitter import Emitter
from draftkeep.ingest.forwarder import Forwarder
from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.ingest.kafka_writer import KafkaWriter
from draftkeep.ingest.record import peek_trace_id
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.ingest.trace import Provenance, Trace

WAIT_S = 60.0
RATE_PER_S = 200.0
DRAIN_S = 240.0
_POLL_S = 0.02


def wait_for(condition: Callable[[], object], timeout_s: float = WAIT_S) -> None:
    """Wait until it holds; the bound only keeps a broken test from hanging."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "the condition never held"
        time.sleep(_POLL_S)


def drained(forwarder: Forwarder) -> bool:
    """Whether it forwarded everything; False at its first failure."""
    try:
        forwarder.drain()
    except StoreError:
        return False
    return True


def resident_bytes() -> int:
    """What this process occupies at present."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


class Steady:
    """An emitter that is offered `rate_per_s` traces from a thread of its own, its log, and a
    forwarder. `start`, then `stop`; in between a test may do to the brokers what it likes.
    """

    def __init__(
        self,
        log: SqliteLog,
        make_emitter: Callable[..., Emitter],
        access: KafkaAccess,
        topic: str,
        *,
        trace: Trace,
        provenance: Callable[[], Provenance],
        deadline_s: float,
        rate_per_s: float = RATE_PER_S,
    ) -> None:
        self.log = log
        self.offers_s = array("d")
        self.emitter = make_emitter(log, breaker=Breaker(threshold=5, max_pause_s=0.5))
        self._trace, self._provenance = trace, provenance
        self._interval_s = 1 / rate_per_s
        budget_bytes = 64 * 1024**2
        patient = replace(access, patience_s=min(access.patience_s, deadline_s))
        self.writer = KafkaWriter(patient, topic, budget_bytes=budget_bytes, deadline_s=deadline_s)
        self.forwarder = Forwarder(log, self.writer, budget_bytes=budget_bytes, clock=time.time)
        self._over, self._stop = threading.Event(), threading.Event()
        self._offering = threading.Thread(target=self._offer, daemon=True)
        self._forwarding = threading.Thread(
            target=self.forwarder.run, args=(self._stop,), daemon=True
        )

    def start(self) -> None:
        """Emit and forward."""
        self._offering.start()
        self._forwarding.start()

    def forwards(self) -> None:
        """Wait until a hundred traces more than at present have gone to Kafka."""
        reached = self.forwarder.stats().sent_records + 100
        wait_for(lambda: self.forwarder.stats().sent_records >= reached)

    def offer_p99_s(self, since: int = 0) -> float:
        """Of the offers made since the `since`th."""
        taken = sorted(self.offers_s[since:])
        return taken[math.ceil(0.99 * len(taken)) - 1]

    def stop(self) -> None:
        """Stop emitting, wait until everything is forwarded, and end."""
        self._over.set()
        self._offering.join()
        assert self.emitter.flush(WAIT_S)
        wait_for(self._empty, DRAIN_S)
        self.end()

    def end(self) -> None:
        """End without waiting for anything; harmless when repeated."""
        self._over.set()
        self._stop.set()
        if self._forwarding.is_alive():
            self._forwarding.join(WAIT_S)
        self.writer.close(1)

    def _empty(self) -> bool:
        first, end = self.log.bounds()
        return first == end

    def _offer(self) -> None:
        due_s = time.monotonic()
        while not self._over.is_set():
            provenance = self._provenance()
            begun_s = time.perf_counter()
            self.emitter.offer(self._trace, provenance)
            self.offers_s.append(time.perf_counter() - begun_s)
            due_s += self._interval_s
            time.sleep(max(0.0, due_s - time.monotonic()))


def arrived(access: KafkaAccess, topic: str) -> Counter[bytes | None]:
    """How often every trace id is in the topic."""
    consumer = access.connect(KafkaConsumer, enable_auto_commit=False, auto_offset_reset="earliest")
    try:
        partitions = [
            TopicPartition(topic, partition) for partition in consumer.partitions_for_topic(topic)
        ]
        consumer.assign(partitions)
        ends = consumer.end_offsets(partitions)
        found: Counter[bytes | None] = Counter()
        while any(consumer.position(one) < ends[one] for one in partitions):
            for records in consumer.poll(timeout_ms=500).values():
                found.update(peek_trace_id(record.value) for record in records)
        return found
    finally:
        consumer.close()
