"""A catalog of many shards: what grows with their number, whatever is in them.

The shards are empty files with a row each. At the checkpoints: a commit of one small shard, the
list of all shards, a sweep and a merge that find nothing to do, and the opening of an audit.
"""

import os
import random
from pathlib import Path

import sqlalchemy as sa

from bench.scale.points import Took, checkpoints, middle, timed
from bench.scale.run import MS, Run
from bench.scale.traffic import PERIOD_S, START_S, TARGET, TTL_S, Traffic
from draftkeep.store import rewriter
from draftkeep.store.audit import AuditSession
from draftkeep.store.catalog import Catalog
from draftkeep.store.database import insert_many
from draftkeep.store.schema import shards, trace_ids
from draftkeep.store.shard import SHARD_FORMAT, ShardFile
from draftkeep.store.shard_rows import add_shard, list_shards
from draftkeep.store.storage_local import LocalStorage
from draftkeep.store.stored_file import SUFFIX
from draftkeep.store.sweeper import Sweeper

PHASE = "shards"
_BUCKETS = TTL_S // PERIOD_S
_SIZE_BYTES = 128 * 1024**2
_CHUNK = 1000
_COMMITTED = 64
_COMMITS, _TIMES = 9, 3


def many_shards(run: Run) -> None:
    """List shards up to the wanted number; goes on from what the catalog lists."""
    directory = run.directory / PHASE
    (directory / "files").mkdir(parents=True, exist_ok=True)
    storage = LocalStorage(directory / "files")
    catalog = Catalog.open(directory / "catalog.db")
    try:
        with catalog.read() as connection:
            done = connection.scalar(sa.select(sa.func.count()).select_from(shards)) or 0
        run.points.forget(PHASE, beyond=done)
        with run.bar(f"{PHASE}: shards", run.sizes.shards) as bar:
            for stop in checkpoints(run.sizes.shards):
                while done < stop:
                    count = min(_CHUNK, stop - done)
                    _list(catalog, storage, done, count)
                    done += count
                    bar.at(done)
                if not run.points.has(PHASE, "peak_rss", stop):
                    _measure(run, catalog, storage, stop)
    finally:
        catalog.close()


def _list(catalog: Catalog, storage: LocalStorage, first: int, count: int) -> None:
    files = [_file(storage, number) for number in range(first, first + count)]
    with catalog.begin(shared=True) as connection:
        rows = [
            {
                "name": file.name,
                "format": SHARD_FORMAT,
                "bucket_s": file.bucket_s,
                "target": TARGET,
                "rows": file.rows,
                "bytes": file.size_bytes,
                "sha256": file.sha256,
                "created_s": 1.0,
            }
            for file in files
        ]
        connection.execute(sa.insert(shards), rows)


def _file(storage: LocalStorage, number: int | str) -> ShardFile:
    serial = f"{number:08}" if isinstance(number, int) else number
    bucket_s = START_S + TTL_S + random.Random(serial).randrange(_BUCKETS) * PERIOD_S
    name = f"{bucket_s}-{TARGET.hex()[:8]}-{serial}{SUFFIX}"
    Path(storage.path(name)).touch()
    return ShardFile(
        storage=storage,
        name=name,
        bucket_s=bucket_s,
        target=TARGET,
        rows=12_000,
        size_bytes=_SIZE_BYTES,
        sha256=bytes(32),
    )


def _measure(run: Run, catalog: Catalog, storage: LocalStorage, at: int) -> None:
    commits = [_commit(catalog, storage, f"extra-{at}-{number}") for number in range(_COMMITS)]
    run.add(PHASE, "commit", at, middle(commits), MS)
    sweeper = Sweeper(catalog, storage, clock=lambda: START_S, grace_s=1e12)

    def listing() -> None:
        with catalog.read() as connection:
            list_shards(connection)

    def merging() -> None:
        rewriter.merge(
            catalog,
            storage,
            target_bytes=_SIZE_BYTES,
            now_s=START_S,
            new_serial=rewriter.random_serial,
        )

    def auditing() -> None:
        AuditSession(catalog, storage, now_s=START_S).close()

    for step, work in (
        ("list", listing),
        ("idle_sweep", sweeper.run_once),
        ("idle_merge", merging),
        ("audit_open", auditing),
    ):
        run.add(PHASE, step, at, middle(timed(work)[1] for _ in range(_TIMES)), MS)
    run.add_peak(PHASE, at)


def _commit(catalog: Catalog, storage: LocalStorage, serial: str) -> Took:
    """A shard of few traces and their ids, and its removal, so that the number stays."""
    file = _file(storage, serial)
    batch = Traffic(per_bucket=100_000).batches(0, _COMMITTED)[0]

    def commit() -> None:
        with catalog.begin(shared=True) as connection:
            shard_id = add_shard(connection, file, 1.0)
            rows = [
                row | {"shard": shard_id, "trace_id": os.urandom(16)} for row in batch.trace_rows()
            ]
            insert_many(connection, trace_ids, rows)

    _, took = timed(commit)
    with catalog.begin() as connection:
        connection.execute(sa.delete(trace_ids))
        connection.execute(sa.delete(shards).where(shards.c.name == file.name))
    file.remove()
    return took
