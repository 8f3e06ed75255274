"""The demo over Kafka: a topic of its own between the serving node and the compactor."""

import re
import time

from draftkeep.config import Config
from draftkeep.errors import DraftkeepError, InputError
from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.ingest.kafka_topic import create_topic, default_replicas, delete_topic
from draftkeep.ingest.kafka_topic_state import look_at_topic
from draftkeep.ingest.sqlite_log import SqliteLog

PARTITIONS = 2
_FORWARD_TIMEOUT_S = 60.0
_URL = re.compile(r"kafka://([^/@\s,]+:\d+(?:,[^/@\s,]+:\d+)*)/?")


def servers_of(url: str) -> tuple[str, ...]:
    """The brokers in kafka://HOST:PORT[,HOST:PORT...]. Raises InputError for anything else."""
    found = _URL.fullmatch(url)
    if found is None:
        raise InputError("--log is not a broker's address; expected kafka://HOST:PORT")
    return tuple(found[1].split(","))


def make_topic(config: Config) -> None:
    """Make the demo's topic where it is not there yet, as many replicas as brokers up to three.

    Raises StoreError where the brokers cannot be reached or refuse.
    """
    access = KafkaAccess.configured(config.kafka)
    with access.admin() as admin:
        if look_at_topic(admin, config.kafka.topic) is not None:
            return
        replicas = default_replicas(admin)
    create_topic(
        access,
        config.kafka.topic,
        partitions=PARTITIONS,
        replicas=replicas,
        ttl_s=config.retention.ttl_s,
    )


def remove_topic(config: Config) -> None:
    """Delete the demo's topic. Raises StoreError where the brokers cannot be reached or refuse."""
    name = config.kafka.topic
    with KafkaAccess.configured(config.kafka).admin() as admin:
        state = look_at_topic(admin, name)
        if state is not None:
            delete_topic(admin, name, state.topic_id, patience_s=config.kafka.deadline_s)


def wait_until_forwarded(config: Config) -> None:
    """Wait until the node's outbox is empty. Raises DraftkeepError where it does not get so."""
    outbox = SqliteLog.open_reader(config.log_path)
    deadline_s = time.monotonic() + _FORWARD_TIMEOUT_S
    try:
        while True:
            first, following = outbox.bounds()
            if first == following:
                return
            if time.monotonic() > deadline_s:
                raise DraftkeepError(
                    f"{following - first} traces still wait for Kafka after "
                    f"{_FORWARD_TIMEOUT_S:g} s; see serve.log in the demo's directory"
                )
            time.sleep(0.1)
    finally:
        outbox.close()
