"""From the node's log into Kafka, and from Kafka into shards, on a broker of this machine."""

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from nacl.signing import VerifyKey

from bench.store.work import MB, Figure, Node
from draftkeep.errors import DraftkeepError
from draftkeep.ingest.forwarder import Forwarder
from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.ingest.kafka_log import KafkaLog
from draftkeep.ingest.kafka_topic import create_topic
from draftkeep.ingest.kafka_writer import KafkaWriter
from draftkeep.ingest.record import SealedTrace, decode_record, signed_message
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.store.catalog import Catalog
from tests.services.kafka import JVM, running_kafka

PARTITIONS = 3
_TOPIC, _OTHER_TOPIC = "traces", "alone"
_TTL_S = 86_400.0
_BUDGET_BYTES = 64 * 1024**2
_DEADLINE_S = 30.0
_VERIFIED = 2000


def forwarder_mb_s(node: Node) -> list[Figure]:
    """MB a second from the embedded log to Kafka's acknowledgement, beside the client alone."""
    records = node.records(node.sizes.traces)
    sizes_mb = sum(map(len, records)) / MB
    with _broker(node.directory) as access, node.log() as log:
        for at in range(0, len(records), 100):
            log.append(records[at : at + 100])
        alone_s = _produce(access, records)
        cpu_s, started_s = time.process_time(), time.perf_counter()
        _forward(log, access)
        seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_s
    conditions = {"record_bytes": len(records[0]), "records": len(records)}
    conditions |= {"partitions": PARTITIONS}
    return [
        Figure(
            metric="forwarder_mb_s",
            value=sizes_mb / seconds,
            unit="MB/s",
            conditions=conditions | {"cpu_s_per_100_mb": 100 * cpu_s / sizes_mb},
        ),
        Figure(
            metric="kafka_produce_mb_s",
            value=sizes_mb / alone_s,
            unit="MB/s",
            against="kafka-python alone with the same settings, records in memory",
            conditions=conditions,
        ),
        Figure(
            metric="forwarder_vs_client",
            value=alone_s / seconds,
            unit="ratio",
            against="kafka-python alone",
            conditions=conditions,
        ),
    ]


def compactor_mb_s(node: Node) -> list[Figure]:
    """MB a CPU-second from Kafka to committed shards, beside each part of it alone.

    The first partition warms the process up, as it is after its first minute; the rest count.
    """
    records = node.records(node.sizes.traces)
    sealed = [decode_record(record) for record in records]
    record_mb = sum(map(len, records)) / MB / len(records)
    with _broker(node.directory) as access, node.catalog() as catalog:
        _fill(access, records, sealed)
        consume_s = _consume(access, _TOPIC, len(records))
        warm = _compact(node, access, catalog, [0])
        rest = _compact(node, access, catalog, range(1, PARTITIONS))
    if warm.traces + rest.traces != len(records):
        raise DraftkeepError(
            f"the compactor stored {warm.traces + rest.traces} traces of {len(records)}"
        )
    conditions = {"record_bytes": len(records[0]), "records": len(records)}
    rates = {
        "kafka_consume_mb_s_core": (consume_s, "kafka-python's consumer alone"),
        "ed25519_mb_s_core": (_verify(node, sealed), "one Ed25519 verification a trace alone"),
        "parquet_mb_s_core": (
            _parquet(node.directory, sealed),
            "pyarrow, ciphertexts alone, uncompressed and synced",
        ),
    }
    return [
        Figure(
            metric="compactor_mb_s_core",
            value=record_mb * rest.traces / rest.cpu_s,
            unit="MB/CPU-s",
            conditions=conditions | {"wall_mb_s": record_mb * rest.traces / rest.seconds},
        ),
        *(
            Figure(
                metric=metric,
                value=record_mb * len(records) / alone_s,
                unit="MB/CPU-s",
                against=against,
                conditions=conditions,
            )
            for metric, (alone_s, against) in rates.items()
        ),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compacted:
    traces: int
    cpu_s: float
    seconds: float


def _compact(
    node: Node, access: KafkaAccess, catalog: Catalog, partitions: Iterable[int]
) -> _Compacted:
    """Move these partitions into shards, one after the other, to their ends."""
    stored, cpu_s, started_s = 0, time.process_time(), time.perf_counter()
    for partition in partitions:
        log = KafkaLog(access, _TOPIC, partition=partition)
        compactor = node.compactor(log, catalog)
        while (report := compactor.run_once()).read:
            stored += report.stored
        log.close()
    return _Compacted(
        traces=stored,
        cpu_s=time.process_time() - cpu_s,
        seconds=time.perf_counter() - started_s,
    )


@contextmanager
def _broker(parent: Path) -> Iterator[KafkaAccess]:
    with running_kafka(parent / "kafka", jvm=JVM) as kafka:
        for topic in (_TOPIC, _OTHER_TOPIC):
            create_topic(kafka.access, topic, partitions=PARTITIONS, replicas=1, ttl_s=_TTL_S)
        yield kafka.access


def _forward(log: SqliteLog, access: KafkaAccess) -> None:
    writer = KafkaWriter(access, _TOPIC, budget_bytes=_BUDGET_BYTES, deadline_s=_DEADLINE_S)
    Forwarder(log, writer, budget_bytes=_BUDGET_BYTES, clock=time.time).drain()
    writer.close()


def _produce(access: KafkaAccess, records: Sequence[bytes]) -> float:
    """Seconds until kafka-python alone has the records acknowledged."""
    producer: Any = access.connect(
        KafkaProducer,
        enable_idempotence=False,
        acks="all",
        batch_size=1024**2,
        max_request_size=4 * 1024**2,
        linger_ms=5,
    )
    started_s = time.perf_counter()
    sent = [
        producer.send(_OTHER_TOPIC, record, partition=number % PARTITIONS)
        for number, record in enumerate(records)
    ]
    for future in sent:
        future.get(timeout=_DEADLINE_S)
    seconds = time.perf_counter() - started_s
    producer.close()
    return seconds


def _fill(access: KafkaAccess, records: Sequence[bytes], sealed: Sequence[SealedTrace]) -> None:
    writer = KafkaWriter(access, _TOPIC, budget_bytes=_BUDGET_BYTES, deadline_s=_DEADLINE_S)
    for at in range(0, len(records), 1000):
        keys = [item.parsed.trace_id for item in sealed[at : at + 1000]]
        writer.append(records[at : at + 1000], keys=keys)
    writer.close()


def _consume(access: KafkaAccess, topic: str, count: int) -> float:
    """CPU-seconds in which kafka-python alone fetches so many records."""
    cpu_s = time.process_time()
    consumer: Any = access.connect(
        KafkaConsumer,
        enable_auto_commit=False,
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=4 * 1024**2,
    )
    consumer.assign([TopicPartition(topic, partition) for partition in range(PARTITIONS)])
    while count > 0:
        count -= sum(map(len, consumer.poll(timeout_ms=1000).values()))
    consumer.close()
    return time.process_time() - cpu_s


def _verify(node: Node, sealed: Sequence[SealedTrace]) -> float:
    """CPU-seconds for one bare signature check a trace; a few are checked."""
    key = VerifyKey(node.signing.public)
    checks = [
        (item.signature, signed_message(item.header, item.nonce, item.ciphertext, item.commitment))
        for item in sealed[:_VERIFIED]
    ]
    cpu_s = time.process_time()
    for signature, message in checks:
        key.verify(message, signature)
    return (time.process_time() - cpu_s) * len(sealed) / len(checks)


def _parquet(parent: Path, sealed: Sequence[SealedTrace]) -> float:
    """CPU-seconds for the ciphertexts as one synced Parquet file."""
    column = [item.ciphertext for item in sealed]
    with TemporaryDirectory(dir=parent) as name:
        path = Path(name) / "alone.parquet"
        cpu_s = time.process_time()
        table = pa.table({"ciphertext": pa.array(column, pa.binary())})
        pq.write_table(
            table, path, compression="none", use_dictionary=False, write_statistics=False
        )
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return time.process_time() - cpu_s
