"""The demo over Kafka: a topic of its own between the serving node and the compactor."""

import re
import time

from kafka.errors import KafkaError

from draftkeep.config import Config
from draftkeep.errors import DraftkeepError, InputError
from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.ingest.kafka_topic import create_topic
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
        if config.kafka.topic in admin.list_topics():
            return
        brokers = len(admin.describe_cluster()["brokers"])
    create_topic(
        access,
        config.kafka.topic,
        partitions=PARTITIONS,
        replicas=min(3, brokers),
        ttl_s=config.retention.ttl_s,
    )


def remove_topic(config: Config) -> None:
    """Delete the demo's topic. Raises StoreError where the brokers cannot be reached or refuse."""
    with KafkaAccess.configured(config.kafka).admin() as admin:
        try:
            if config.kafka.topic in admin.list_topics():
                admin.delete_topics([config.kafka.topic])
        except KafkaError as error:
            raise DraftkeepError(
                f"topic {config.kafka.topic} could not be deleted ({type(error).__name__}); "
                "delete it yourself, then remove the directory"
            ) from error


def wait_until_forwarded(config: Config) -> None:
    """Wait until the node's outbox is empty. Raises DraftkeepError where it does not get so."""
    outbox = SqliteLog.open_reader(config.state_dir / "log" / "traces")
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
