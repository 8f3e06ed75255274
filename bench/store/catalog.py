"""What the commit of one batch costs in a full catalog, on both databases."""

import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import sqlalchemy as sa

from bench.store.work import NODE, TARGET, TENANT, Figure, Node
from draftkeep.ingest.log import PartitionId
from draftkeep.store.catalog import Catalog
from draftkeep.store.database import insert_many
from draftkeep.store.offsets import LogOffset, advance
from draftkeep.store.schema import shards, trace_ids
from draftkeep.store.shard import ShardFile
from draftkeep.store.shard_rows import add_shard
from draftkeep.store.storage import Storage
from tests.services.postgres import running_postgres

_PARTITION = PartitionId(cluster="cluster", topic_id="topic", partition=0)
_IDS = 1000
_PERIOD_S = 3600
_PERIODS = 168
_CHUNK_SHARDS = 1000
_FLOOR_SYNCS = 100
_WRITE_AHEAD = {"max_wal_size": "2GB"}


def commit_ms(node: Node) -> list[Figure]:
    """Milliseconds of a commit of a thousand trace ids, by database, and of one bare sync."""
    figures = []
    for database, connected in (("sqlite", _sqlite), ("postgresql", _postgres)):
        with connected(node) as catalog:
            _fill(catalog, node.sizes.shards, node.sizes.ids_a_shard)
            taken_ms = _commits(catalog, node.storage, node.sizes.commits)
        conditions = {
            "database": database,
            "shards": node.sizes.shards,
            "ids": node.sizes.shards * node.sizes.ids_a_shard,
            "ids_a_commit": _IDS,
            "commits": node.sizes.commits,
        }
        figures += [
            Figure(
                metric="catalog_commit_ms",
                value=float(np.percentile(taken_ms, rank)),
                unit="ms",
                conditions=conditions | {"percentile": f"p{rank}"},
            )
            for rank in (50, 90)
        ]
    return [*figures, _sync_ms(node.directory)]


@contextmanager
def _sqlite(node: Node) -> Iterator[Catalog]:
    with node.catalog() as catalog:
        yield catalog


@contextmanager
def _postgres(node: Node) -> Iterator[Catalog]:
    with running_postgres(fsync=True, settings=_WRITE_AHEAD) as server:
        catalog = Catalog.connect(server.create_database())
        try:
            yield catalog
        finally:
            catalog.close()


def _fill(catalog: Catalog, count: int, ids_a_shard: int) -> None:
    draw = random.Random(1)
    with catalog.begin() as connection:
        for start in range(0, count, _CHUNK_SHARDS):
            numbers = range(start, min(start + _CHUNK_SHARDS, count))
            insert_many(connection, shards, [_shard_row(number, draw) for number in numbers])
            rows = [
                _trace_row(_PERIOD_S * (number % _PERIODS), number + 1, draw)
                for number in numbers
                for _ in range(ids_a_shard)
            ]
            insert_many(connection, trace_ids, rows)
        if connection.dialect.name == "postgresql":
            last = sa.text("SELECT setval('shards_id_seq', (SELECT max(id) FROM shards))")
            connection.execute(last)
    _settle(catalog)


def _settle(catalog: Catalog) -> None:
    """Have what was filled on disk, so that the commits do not pay for it."""
    if catalog.engine.dialect.name == "postgresql":
        engine = catalog.engine.execution_options(isolation_level="AUTOCOMMIT")
        with engine.connect() as connection:
            for command in ("VACUUM ANALYZE", "CHECKPOINT"):
                connection.exec_driver_sql(command)
    else:
        # Not by the engine, which would begin a transaction first.
        raw = catalog.engine.raw_connection()
        raw.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)")
        raw.close()
    os.sync()


def _commits(catalog: Catalog, storage: Storage, count: int) -> list[float]:
    """Milliseconds of each of `count` commits into a bucket of its own, as a compactor makes."""
    draw = random.Random(2)
    bucket_s = _PERIOD_S * _PERIODS
    taken_ms = []
    for number in range(count):
        rows = sorted(
            (_trace_row(bucket_s, 0, draw) for _ in range(_IDS)), key=lambda row: row["trace_id"]
        )
        stored = number * _IDS or None
        offset = LogOffset(identity=_PARTITION, stored=stored, first=0, following=10**9)
        started_s = time.perf_counter()
        with catalog.begin(shared=True) as connection:
            advance(connection, offset, (number + 1) * _IDS, 1.0, [])
            shard = add_shard(connection, _file(storage, bucket_s, number), 1.0)
            for row in rows:
                row["shard"] = shard
            insert_many(connection, trace_ids, rows)
        taken_ms.append((time.perf_counter() - started_s) * 1000)
    return taken_ms


def _file(storage: Storage, bucket_s: int, number: int) -> ShardFile:
    return ShardFile(
        storage=storage,
        name=f"{bucket_s}-{number}.parquet",
        bucket_s=bucket_s,
        target=TARGET,
        rows=_IDS,
        size_bytes=10_000 * _IDS,
        sha256=bytes(32),
    )


def _shard_row(number: int, draw: random.Random) -> dict[str, Any]:
    return {
        "id": number + 1,
        "name": f"{draw.randbytes(16).hex()}.parquet",
        "format": 1,
        "bucket_s": _PERIOD_S * (number % _PERIODS),
        "target": TARGET,
        "rows": 10,
        "bytes": 100_000,
        "sha256": draw.randbytes(32),
        "created_s": 1.0,
    }


def _trace_row(bucket_s: int, shard: int, draw: random.Random) -> dict[str, Any]:
    return {
        "bucket_s": bucket_s,
        "trace_id": draw.randbytes(16),
        "node": NODE,
        "digest": draw.randbytes(32),
        "tenant": TENANT,
        "alias": draw.randbytes(16),
        "period_id": bucket_s.to_bytes(16, "big"),
        "positions": 142,
        "shard": shard,
    }


def _sync_ms(directory: Path) -> Figure:
    path, taken_ms = directory / "floor", []
    with path.open("wb", buffering=0) as file:
        for _ in range(_FLOOR_SYNCS):
            started_s = time.perf_counter()
            file.write(bytes(4096))
            os.fdatasync(file.fileno())
            taken_ms.append((time.perf_counter() - started_s) * 1000)
    path.unlink()
    return Figure(
        metric="fdatasync_ms",
        value=float(np.median(taken_ms)),
        unit="ms",
        against="4 kB at the end of a file",
    )
