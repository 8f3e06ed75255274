"""A process that commits shards and offsets to a catalog as a compactor does, until all are there.

The records are numbers, so the test can count them; whoever is beaten to an offset drops its file
and looks again.
"""

import random
from pathlib import Path

import sqlalchemy as sa

from draftkeep.errors import ConflictError
from draftkeep.ingest.log import PartitionId
from draftkeep.store.catalog import Catalog
from draftkeep.store.database import insert_many
from draftkeep.store.offsets import LogOffset, advance
from draftkeep.store.rewriter import random_serial
from draftkeep.store.schema import offsets, trace_ids
from draftkeep.store.shard import ShardFile
from draftkeep.store.shard_rows import add_shard, require_present
from draftkeep.store.storage_local import LocalStorage

BUCKET_S = 9


def trace_id(partition: int, number: int) -> bytes:
    """What record `number` of a partition is called in the catalog."""
    return f"{partition}/{number}".encode()


def write_everything(
    url: str, directory: Path, *, seed: int, partitions: int, records: int, batch: int
) -> None:
    """Move `records` records of each partition into shards of at most `batch`."""
    rng, catalog = random.Random(seed), Catalog.connect(url)
    unfinished = list(range(partitions))
    while unfinished:
        partition = rng.choice(unfinished)
        with catalog.read() as connection:
            stored = connection.scalar(
                sa.select(offsets.c.next).where(offsets.c.partition == partition)
            )
        if stored == records:
            unfinished.remove(partition)
            continue
        identity = PartitionId(cluster="c", topic_id="t", partition=partition)
        where = LogOffset(identity=identity, stored=stored, first=0, following=records)
        _move(catalog, directory, where, min(where.start + rng.randint(1, batch), records))
    catalog.close()


def _move(catalog: Catalog, directory: Path, where: LogOffset, following: int) -> None:
    name = f"{random_serial()}.parquet"
    (directory / name).write_bytes(b"shard")
    storage = LocalStorage(directory)
    rows = following - where.start
    file = ShardFile(
        storage=storage,
        name=name,
        bucket_s=BUCKET_S,
        target=b"T",
        rows=rows,
        size_bytes=5,
        sha256=b"s",
    )
    fixed = {"bucket_s": BUCKET_S, "node": "n1", "digest": b"d", "tenant": "acme", "alias": b"a"}
    try:
        with catalog.begin(shared=True) as connection:
            advance(connection, where, following, 1.0, [])
            require_present(file)
            fixed |= {"period_id": b"p", "positions": 1, "shard": add_shard(connection, file, 1.0)}
            insert_many(
                connection,
                trace_ids,
                [
                    fixed | {"trace_id": trace_id(where.identity[2], number)}
                    for number in range(where.start, following)
                ],
            )
    except ConflictError:
        file.remove()
