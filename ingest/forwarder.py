"""Forwarder: an embedded log, moved into Kafka. What the brokers do not take stays."""

import contextlib
import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Self

from draftkeep.config import KafkaConfig
from draftkeep.errors import LogFullError, StoreError
from draftkeep.ingest.forward_counts import ForwardCounts, ForwardStats
from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.ingest.kafka_writer import RECORD_COST_BYTES, KafkaWriter, Sending
from draftkeep.ingest.log import Log, LogRecord
from draftkeep.ingest.record import peek_trace_id
from draftkeep.outage import Outage
from draftkeep.policies.names import ID_BYTES

_GROUP_RECORDS = 1024
_GROUP_BYTES = 4 * 1024**2
# One is being acknowledged while the next is read and sent.
_ABREAST = 2
# What is sent at once shrinks this far while deadlines are missed, halved at every one, and grows
# in so many steps: a network that is still slow would only miss the next one.
_SHRINK = 64
# Freeing rewrites a part of a file, so it is done in few large steps.
_FREE_BYTES = 64 * 1024**2
_FREE_S = 1.0
_LOOK_S = 1.0
_IDLE_S = 0.25
_LONGEST_PAUSE_S = 4.0

_log = logging.getLogger(__name__)


class _Group:
    """Neighbours in the log, from reading them to their acknowledgement."""

    def __init__(self, records: Sequence[LogRecord]) -> None:
        self.end = records[-1].offset + 1
        self.oldest_s = records[0].appended_s
        # Those without an acknowledgement.
        self.records = [record.data for record in records]
        # How many of them, from the first, are on their way.
        self.sent = 0
        self.sending: Sending | None = None


class Forwarder:
    """Writes a log's records to Kafka, from its first one on, and frees what was acknowledged.

    At least once: a record leaves the log after the brokers' acknowledgement, so a crash in
    between, a second forwarder, or an answer that got lost leave duplicates, which readers drop by
    trace id; it is also the key, so they lie in one partition. Nothing else is looked at: a record
    that cannot be read goes on under a key of its own, for the compactor to set aside. One that
    the topic refuses for its size stays and holds up all behind it, loudly: no record is larger
    than 900,000 bytes, so the topic's `max.message.bytes` is wrong, and to set aside what a wrong
    setting refuses would be to lose it. A missing topic and a refused login are waited for
    likewise. Where a topic was made again, records go on into the one that is there.

    Holds two groups of at most 4 MiB in memory, less where `budget_bytes` is below 32 MiB. Of
    them it sends less at once, down to a 64th, while deadlines are missed: on a slow network a
    large group would never get through, and be written again with every try. `run` and `drain` are
    for one thread at a time, `stats` and `close` for any. `clock` is the wall clock. Owns the
    writer; the log stays the caller's to close.
    """

    def __init__(
        self, log: Log, writer: KafkaWriter, *, budget_bytes: int, clock: Callable[[], float]
    ) -> None:
        self._log = log
        self._writer = writer
        # An eighth each for a group's bytes and for what its records cost beside them.
        self._group_bytes = min(_GROUP_BYTES, budget_bytes // 8)
        self._group_records = min(_GROUP_RECORDS, budget_bytes // 8 // RECORD_COST_BYTES)
        self._at_once_bytes = self._group_bytes
        self._counts = ForwardCounts(clock)
        self._groups: deque[_Group] = deque()
        self._position: int | None = None
        self._acknowledged_to = 0
        self._unfreed_bytes = 0
        self._freed_s = self._looked_s = float("-inf")

    @classmethod
    def configured(
        cls, log: Log, access: KafkaAccess, config: KafkaConfig, *, clock: Callable[[], float]
    ) -> Self:
        """With a writer as a configuration says. Connects to nobody yet."""
        writer = KafkaWriter(
            access,
            config.topic,
            budget_bytes=config.budget_bytes,
            deadline_s=config.deadline_s,
        )
        return cls(log, writer, budget_bytes=config.budget_bytes, clock=clock)

    def run(self, stop: threading.Event) -> None:
        """Forward what comes, until `stop`, and then once more what is there. Never raises.

        After a failure the next attempt begins at least 1 s after the failed one had begun, 4 s
        after several.
        """
        outage = Outage("forwarding to Kafka", longest_s=_LONGEST_PAUSE_S)
        while not stop.is_set():
            begun_s = time.monotonic()
            try:
                idle = not self._advance()
            except Exception as error:
                self._counts.failed()
                now_s = time.monotonic()
                outage.failed(f"{_reason(error)}. The log keeps all and sends it again", now_s)
                stop.wait(max(0.0, begun_s + outage.pause_s - now_s))
            else:
                outage.worked(time.monotonic())
                if idle:
                    stop.wait(_IDLE_S)
        try:
            self.drain()
        except Exception as error:
            self._counts.failed()
            with contextlib.suppress(StoreError):
                self._counts.look(self._log)
            _log.warning("%s: %s", left_behind(self.stats()), _reason(error))

    def drain(self) -> None:
        """Forward what there is, to the end, and free it.

        Raises StoreError at the first failure; what was not acknowledged stays in the log.
        """
        while self._advance():
            pass
        self._free()
        self._counts.look(self._log)

    def stats(self) -> ForwardStats:
        """The counts; what waits is as of a second ago, or of the attempt under way."""
        return self._counts.stats()

    def close(self, timeout_s: float | None = None) -> None:
        """See `KafkaWriter.close`; a `run` or `drain` under way fails after that."""
        self._writer.close(timeout_s)

    def _advance(self) -> bool:
        """Send what is next and settle what is first; False where nothing is left to do."""
        now_s = time.monotonic()
        if now_s >= self._looked_s + _LOOK_S:
            self._counts.look(self._log)
            self._looked_s = now_s
        abreast = _ABREAST if self._at_once_bytes == self._group_bytes else 1
        for group in list(self._groups)[:abreast]:
            if group.sending is None:
                self._send(group)
        at_end = len(self._groups) < abreast and not self._read()
        if self._groups and (at_end or len(self._groups) >= abreast):
            self._settle(self._groups[0])
        idle = at_end and not self._groups
        if self._unfreed_bytes >= _FREE_BYTES or (idle and now_s >= self._freed_s + _FREE_S):
            self._free()
        return not idle

    def _read(self) -> bool:
        """Take the next group out of the log and send it; False at the log's end."""
        if self._position is None:
            self._position = self._log.bounds()[0]
        records = self._log.read(self._position, self._group_records, self._group_bytes)
        if not records:
            return False
        group = _Group(records)
        self._groups.append(group)
        self._position = group.end
        self._note_progress()
        self._send(group)
        return True

    def _send(self, group: _Group) -> None:
        records = _first(group.records, self._at_once_bytes)
        keys = [_key(record) for record in records]
        try:
            group.sending = self._writer.begin(records, keys=keys)
        except LogFullError:
            # Two large records can be more than a small budget: the second goes after the first.
            return
        group.sent = len(records)

    def _settle(self, group: _Group) -> None:
        """Wait for a group's acknowledgement; of one that failed, keep what is to be sent again."""
        sending, group.sending = group.sending, None
        if sending is None:
            raise StoreError("the budget is used up by others; give the forwarder its own writer")
        sent, rest = group.records[: group.sent], group.records[group.sent :]
        left = sent
        try:
            sending.wait()
            left = []
            grown_bytes = self._at_once_bytes + self._group_bytes // _SHRINK
            self._at_once_bytes = min(grown_bytes, self._group_bytes)
        except StoreError:
            left = [sent[index] for index in sending.unacknowledged()]
            self._at_once_bytes = max(self._at_once_bytes // 2, self._group_bytes // _SHRINK)
            raise
        finally:
            group.records = left + rest
            moved_bytes = _bytes_of(sent) - _bytes_of(left)
            self._unfreed_bytes += moved_bytes
            self._counts.moved(len(sent) - len(left), moved_bytes)
        if not group.records:
            self._acknowledged_to = group.end
            self._groups.popleft()
            self._note_progress()

    def _free(self) -> None:
        """Free what was acknowledged without a gap."""
        if self._unfreed_bytes:
            self._log.free(self._acknowledged_to)
            self._unfreed_bytes = 0
            self._freed_s = time.monotonic()

    def _note_progress(self) -> None:
        oldest_s = self._groups[0].oldest_s if self._groups else None
        self._counts.reached(self._acknowledged_to, oldest_s)


def left_behind(stats: ForwardStats) -> str:
    """What a forwarder that ends says of the traces that it leaves in the log."""
    left = "1 trace stays" if stats.waiting == 1 else f"{stats.waiting} traces stay"
    return f"{left} in the log for the next start, or for draftkeep forward --once"


def _first(records: Sequence[bytes], limit_bytes: int) -> list[bytes]:
    """Those from the first on that stay within the limit; one at least."""
    taken_bytes = 0
    for index, record in enumerate(records):
        taken_bytes += len(record)
        if index and taken_bytes > limit_bytes:
            return list(records[:index])
    return list(records)


def _bytes_of(records: Sequence[bytes]) -> int:
    return sum(map(len, records))


def _reason(error: Exception) -> str:
    """What may be said: our own messages hold nothing secret, of others the type alone."""
    return str(error) if isinstance(error, StoreError) else type(error).__name__


def _key(record: bytes) -> bytes:
    """The trace id, or a digest where there is none; the same for every repeat."""
    return peek_trace_id(record) or hashlib.sha256(record).digest()[:ID_BYTES]
