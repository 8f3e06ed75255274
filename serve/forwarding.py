"""Forwarding: a node's forwarder in a thread of its own, beside serving."""

import logging
import threading
from collections.abc import Callable

from draftkeep.config import KafkaConfig
from draftkeep.ingest.forward_counts import ForwardStats
from draftkeep.ingest.forwarder import Forwarder, left_behind
from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.ingest.log import Log

_log = logging.getLogger(__name__)


class Forwarding:
    """Forwards a log from `start` to `close`. Owns the thread and the connection, not the log.

    The brokers may be away at any time, the start included.
    """

    def __init__(
        self, log: Log, access: KafkaAccess, config: KafkaConfig, *, clock: Callable[[], float]
    ) -> None:
        self._forwarder = Forwarder.configured(log, access, config, clock=clock)
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._forwarder.run, args=(self._stop,), name="forwarder", daemon=True
        )

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stats(self) -> ForwardStats:
        """See `Forwarder.stats`."""
        return self._forwarder.stats()

    def close(self, timeout_s: float) -> None:
        """Forward what is there, if the brokers take it within `timeout_s`, and end.

        A call to brokers that outlasts this ends with the process.
        """
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(0.7 * timeout_s)
        self._forwarder.close(0.1 * timeout_s)
        if self._thread.is_alive():
            self._thread.join(0.2 * timeout_s)
        if self._thread.is_alive():
            _log.warning("%s: the brokers do not answer", left_behind(self._forwarder.stats()))
