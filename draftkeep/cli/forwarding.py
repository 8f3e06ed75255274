"""Forwarding a node's log from outside the node. Needs no key."""

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from draftkeep.config import Config
from draftkeep.errors import ConfigError
from draftkeep.ingest.forwarder import Forwarder
from draftkeep.ingest.kafka_client import KafkaAccess, keep_library_quiet
from draftkeep.ingest.kafka_writer import KafkaWriter
from draftkeep.ingest.sqlite_log import SqliteLog


def forward_once(config: Config) -> dict[str, Any]:
    """Forward what there is and report. Raises StoreError where the brokers do not take it."""
    with _forwarder(config) as forwarder:
        forwarder.drain()
        return asdict(forwarder.stats())


def forward_forever(config: Config) -> None:
    """Forward until SIGINT or SIGTERM; failures are logged and tried again."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    with _forwarder(config) as forwarder:
        forwarder.run(stop)


@contextlib.contextmanager
def _forwarder(config: Config) -> Iterator[Forwarder]:
    if not config.kafka.servers:
        raise ConfigError("kafka.servers is empty; name the brokers that the log is to go to")
    keep_library_quiet()
    log = SqliteLog.open_reader(config.state_dir / "log" / "traces")
    writer = KafkaWriter(
        KafkaAccess.configured(config.kafka),
        config.kafka.topic,
        budget_bytes=config.kafka.budget_bytes,
        deadline_s=config.kafka.deadline_s,
    )
    with contextlib.closing(writer):
        yield Forwarder(log, writer, budget_bytes=config.kafka.budget_bytes, clock=time.time)
