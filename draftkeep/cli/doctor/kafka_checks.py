"""What `draftkeep doctor` asks of the brokers and the topic."""

import time
from collections.abc import Iterator, Mapping

from draftkeep.cli.doctor.finding import Finding
from draftkeep.config import Config
from draftkeep.errors import DraftkeepError
from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.ingest.kafka_log import KafkaLog
from draftkeep.ingest.kafka_retention import TopicRetention, retention_of
from draftkeep.ingest.kafka_topic import MAX_MESSAGE_BYTES
from draftkeep.ingest.kafka_topic_state import (
    TopicState,
    broker_settings,
    look_at_topic,
    topic_settings_of,
)
from draftkeep.ingest.record import MAX_RECORD_BYTES
from draftkeep.store.catalog import Catalog
from draftkeep.store.offsets import committed_offsets, stored_offsets

# Of the topic's retention: who has waited so long is in danger of being deleted unread.
LAG_SHARE = 0.1
# What Kafka stores around a record that is alone in its batch, with room to spare.
BATCH_BYTES = 1024


def check_kafka(config: Config) -> Iterator[Finding]:
    """Brokers, topic, deadline and lag; nothing where compactors read the node's own log.

    Raises StoreError at the first thing that hides the rest.
    """
    if not config.kafka.servers:
        return
    access = KafkaAccess.configured(config.kafka)
    with access.admin() as admin:
        brokers = broker_settings(admin)
        state = look_at_topic(admin, config.kafka.topic)
        settings = {} if state is None else topic_settings_of(admin, config.kafka.topic)
    yield _found("brokers", f"{len(brokers)} answer at {', '.join(config.kafka.servers)}")
    if state is None:
        yield Finding(
            check="topic",
            status="fail",
            detail=f"there is no topic {config.kafka.topic}",
            remedy="draftkeep topic create",
        )
        return
    retention = retention_of(settings, brokers.values())
    try:
        committed, others = _committed(config, state)
    except DraftkeepError:
        # The catalog's own check says why.
        committed, others = None, set()
    yield _topic(state, settings, len(brokers), others)
    yield _deadline(retention, config.retention.ttl_s)
    if committed is None:
        yield _doubtful("lag", "nobody knows it without the catalog", "mend the catalog first")
    else:
        yield _lag(config, access, state, retention, committed)


def _committed(config: Config, state: TopicState) -> tuple[Mapping[int, int], set[str]]:
    """How far the topic was read, and the ids of others of its name that were.

    Raises what hinders opening the catalog.
    """
    catalog = Catalog.existing(config)
    if catalog is None:
        return {}, set()
    try:
        stored = stored_offsets(catalog, state.topic_name)
        ids = {row.topic_id for row in stored if row.cluster == state.cluster}
        return committed_offsets(catalog, state), ids - {state.topic_id}
    finally:
        catalog.close()


def _topic(
    state: TopicState, settings: Mapping[str, str], brokers: int, others: set[str]
) -> Finding:
    replicas = min(len(partition.replicas) for partition in state.partitions.values())
    in_sync = int(settings["min.insync.replicas"])
    largest = MAX_RECORD_BYTES + BATCH_BYTES
    behind = sorted(n for n, partition in state.partitions.items() if not partition.in_sync)
    if others:
        return _wrong(
            "topic",
            f"{state.topic_name} has id {state.topic_id}, and was read under "
            f"{', '.join(sorted(others))}",
            f"draftkeep catalog forget-log {next(iter(sorted(others)))}",
        )
    if in_sync > replicas:
        return _wrong(
            "topic",
            f"min.insync.replicas {in_sync} of {replicas}: nothing is ever acknowledged",
            "lower min.insync.replicas, or add replicas",
        )
    if int(settings["max.message.bytes"]) < largest:
        return _wrong(
            "topic",
            f"max.message.bytes {settings['max.message.bytes']}, and a record has up to {largest}",
            f"set it to {MAX_MESSAGE_BYTES}",
        )
    if behind:
        return _doubtful(
            "topic",
            f"partitions {behind} have replicas that are not in sync",
            "look at the brokers",
        )
    if replicas == 1 and brokers > 1:
        return _doubtful("topic", "one replica: with its broker goes what it holds", "add replicas")
    if replicas > 1 and in_sync != replicas - 1:
        return _doubtful(
            "topic",
            f"min.insync.replicas {in_sync} of {replicas}: "
            + ("one broker down stops everything" if in_sync == replicas else "few must agree"),
            f"set min.insync.replicas to {max(1, replicas - 1)}",
        )
    if settings["compression.type"] not in ("uncompressed", "producer"):
        return _doubtful(
            "topic",
            f"compression.type {settings['compression.type']}: bodies are sealed, it is in vain",
            "set it to uncompressed",
        )
    return _found(
        "topic", f"{state.topic_name}, partitions {len(state.partitions)}, replicas {replicas}"
    )


def _deadline(retention: TopicRetention, ttl_s: int) -> Finding:
    problems = retention.problems(ttl_s)
    if problems:
        what, remedies = zip(*(problem.split("; ", 1) for problem in problems), strict=True)
        return _wrong("deadline", ". ".join(what), ". ".join(remedies))
    age_s = retention.worst_case_age_s
    return _found("deadline", f"a record gets {age_s:g} s old at most, of {ttl_s} s")


def _lag(
    config: Config,
    access: KafkaAccess,
    state: TopicState,
    retention: TopicRetention,
    committed: Mapping[int, int],
) -> Finding:
    waiting = state.unread(committed)
    lost = sorted(n for n, p in state.partitions.items() if p.first > committed.get(n, p.first))
    if lost:
        return _doubtful(
            "lag",
            f"partitions {lost} begin above what was read: records went unread",
            "run more compactors; draftkeep audit --report losses",
        )
    count = sum(len(offsets) for offsets in waiting.values())
    oldest_s = max(
        (_age_s(config, access, number, offsets.start) for number, offsets in waiting.items()),
        default=0.0,
    )
    detail = f"{count} records wait, the oldest for {oldest_s:.0f} s"
    limit_ms = retention.retention_ms
    if limit_ms is not None and oldest_s * 1000 > LAG_SHARE * limit_ms:
        return _doubtful(
            "lag", f"{detail}, of {limit_ms / 1000:g} s", "run draftkeep compact, or more of it"
        )
    return _found("lag", detail)


def _age_s(config: Config, access: KafkaAccess, partition: int, first: int) -> float:
    """How long the first unread record has lain there."""
    log = KafkaLog(
        access, config.kafka.topic, partition=partition, deadline_s=config.kafka.deadline_s
    )
    try:
        found = log.read(first, 1, 1)
    finally:
        log.close()
    return max(0.0, time.time() - found[0].appended_s) if found else 0.0


def _found(check: str, detail: str) -> Finding:
    return Finding(check=check, status="ok", detail=detail)


def _doubtful(check: str, detail: str, remedy: str) -> Finding:
    return Finding(check=check, status="warn", detail=detail, remedy=remedy)


def _wrong(check: str, detail: str, remedy: str) -> Finding:
    return Finding(check=check, status="fail", detail=detail, remedy=remedy)
