"""Many processes commit to one catalog and are killed in the middle: no loss, nothing twice."""

import multiprocessing
import random
import signal
import time
from contextlib import closing
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import sqlalchemy as sa

from draftkeep.store import schema
from draftkeep.store.catalog import Catalog
from tests.store.writer import trace_id, write_everything

PARTITIONS = 3
RECORDS = 300
WRITERS = 4
KILLS = 8


def start(url: str, directory: Path, seed: int) -> ForkServerProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["psycopg", "tests.store.writer"])
    sizes = {"seed": seed, "partitions": PARTITIONS, "records": RECORDS, "batch": 5}
    process = context.Process(target=write_everything, args=(url, directory), kwargs=sizes)
    process.start()
    return process


def test_writers_that_are_killed_lose_nothing_and_write_nothing_twice(
    catalog_url: str, tmp_path: Path
) -> None:
    directory = tmp_path / "shards"
    directory.mkdir()
    catalog = Catalog.connect(catalog_url)
    rng = random.Random(5)
    writers = [start(catalog_url, directory, seed) for seed in range(WRITERS)]
    killed = 0
    while killed < KILLS and any(writer.is_alive() for writer in writers):
        # Wherever a writer is by then; the others go on meanwhile.
        time.sleep(rng.random() * 0.1)
        place = rng.randrange(WRITERS)
        writers[place].kill()
        writers[place].join()
        killed += writers[place].exitcode == -signal.SIGKILL
        writers[place] = start(catalog_url, directory, WRITERS + killed)
    for writer in writers:
        writer.join()
    assert killed > 0
    assert [writer.exitcode for writer in writers] == [0] * WRITERS
    with closing(catalog):
        assert_all_is_there_once(catalog, directory)


def assert_all_is_there_once(catalog: Catalog, directory: Path) -> None:
    offset, trace, shard = schema.offsets.c, schema.trace_ids.c, schema.shards.c
    with catalog.read() as connection:
        offsets = connection.execute(sa.select(offset.partition, offset.next)).all()
        stored = list(connection.scalars(sa.select(trace.trace_id)))
        of_shard = sa.select(trace.shard, sa.func.count()).group_by(trace.shard)
        counted = {found: rows for found, rows in connection.execute(of_shard)}
        listed = connection.execute(sa.select(shard.id, shard.name, shard.rows)).all()
    assert sorted(offsets) == [(partition, RECORDS) for partition in range(PARTITIONS)]
    assert sorted(stored) == sorted(
        trace_id(partition, number) for partition in range(PARTITIONS) for number in range(RECORDS)
    )
    assert counted == {row.id: row.rows for row in listed}
    assert {row.name for row in listed} <= {path.name for path in directory.iterdir()}
