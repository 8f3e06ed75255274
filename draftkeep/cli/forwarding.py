"""Forwarding a node's log from outside the node. Needs no key."""

import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from draftkeep.cli.stopping import stop_event
from draftkeep.config import Config
from draftkeep.errors import ConfigError
from draftkeep.ingest.forwarder import Forwarder
from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.serve.logs import log_to_stderr


def forward_once(config: Config) -> dict[str, Any]:
    """Forward what there is and report. Raises StoreError where the brokers do not take it."""
    with _forwarder(config) as forwarder:
        forwarder.drain()
        return asdict(forwarder.stats())


def forward_forever(config: Config) -> None:
    """Forward until SIGINT or SIGTERM; failures are logged and tried again."""
    with stop_event() as stop, _forwarder(config) as forwarder:
        forwarder.run(stop)


@contextlib.contextmanager
def _forwarder(config: Config) -> Iterator[Forwarder]:
    if not config.kafka.servers:
        raise ConfigError("kafka.servers is empty; name the brokers that the log is to go to")
    log_to_stderr(logging.WARNING)
    log = SqliteLog.open_reader(config.log_path)
    access = KafkaAccess.configured(config.kafka)
    forwarder = Forwarder.configured(log, access, config.kafka, clock=time.time)
    with contextlib.closing(forwarder):
        yield forwarder
