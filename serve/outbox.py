"""Outbox: the way a trace leaves a node, from the emitter's queue to its log and on to Kafka."""

from collections.abc import Callable
from dataclasses import dataclass

from draftkeep.config import Config
from draftkeep.ingest.codec import encode_body
from draftkeep.ingest.emitter import Emitter
from draftkeep.ingest.forward_counts import ForwardStats
from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.ingest.tables import RemapTable
from draftkeep.policies.keyring import Keyring
from draftkeep.policies.signing import SigningKey
from draftkeep.serve.forwarding import Forwarding
from draftkeep.serve.sealing import PublishingSealer
from draftkeep.store.catalog import Catalog


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardingStats:
    """The embedded log on its way to Kafka, and the bytes at which it refuses."""

    cap_bytes: int
    forward: ForwardStats


class Outbox:
    """The embedded log with its emitter and sealer, and its forwarder where there are brokers.

    `start` it once the node does, `close` it before keyring and catalog.
    """

    def __init__(
        self,
        log: SqliteLog,
        sealer: PublishingSealer,
        emitter: Emitter,
        forwarding: Forwarding | None,
        *,
        cap_bytes: int,
    ) -> None:
        self.emitter = emitter
        self.sealer = sealer
        self._log = log
        self._forwarding = forwarding
        self._cap_bytes = cap_bytes

    @classmethod
    def build(
        cls,
        config: Config,
        *,
        keyring: Keyring,
        signing: SigningKey,
        catalog: Catalog,
        clock: Callable[[], float],
        on_drop: Callable[[str], None],
        brokers: KafkaAccess | None = None,
    ) -> "Outbox":
        """Open the log. The node is enrolled with `signing`; `on_drop` is the emitter's.

        `brokers` None: the log is read where it lies. Nobody is connected to yet. Raises what
        opening the log raises; nothing is left open then.
        """
        log = SqliteLog(
            config.log_path,
            cap_bytes=config.log.cap_bytes,
            bucket_s=config.log.bucket_s,
            clock=clock,
        )
        sealer = PublishingSealer(
            keyring.node_keys(), config.serve.node, signing, catalog=catalog, clock=clock
        )
        table = RemapTable.identity()
        emitter = Emitter(
            sealer,
            log,
            encode=lambda trace: encode_body(trace, table),
            queue_traces=config.capture.queue_traces,
            on_drop=on_drop,
        )
        forwarding = (
            None if brokers is None else Forwarding(log, brokers, config.kafka, clock=clock)
        )
        return cls(log, sealer, emitter, forwarding, cap_bytes=config.log.cap_bytes)

    def start(self) -> None:
        """Begin to forward, where there are brokers."""
        if self._forwarding is not None:
            self._forwarding.start()

    def stats(self) -> ForwardingStats | None:
        """What waits for the brokers; None where the log itself is read."""
        if self._forwarding is None:
            return None
        return ForwardingStats(cap_bytes=self._cap_bytes, forward=self._forwarding.stats())

    def expire(self, before_s: float) -> int:
        """Unlink what was appended before `before_s` and is still there; how many traces."""
        return self._log.expire(before_s)

    def close(self, timeout_s: float) -> None:
        """Deliver what waits, drop what is left, and close the log, all within `timeout_s`.

        The forwarder makes a last try; what the brokers do not take stays for the next start.
        """
        self.emitter.close(0.6 * timeout_s)
        if self._forwarding is not None:
            self._forwarding.close(0.2 * timeout_s)
        self._log.close(timeout_s=0.1 * timeout_s)
        # An append that hung has failed by now, and its traces count as dropped.
        self.emitter.close(0.1 * timeout_s)
