"""Counting after a campaign, by means that are not ours: DuckDB, SQL, the broker's offsets."""

import os
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass

import duckdb
import sqlalchemy as sa
from kafka import KafkaConsumer, TopicPartition

from draftkeep.ingest.envelope import Opener
from draftkeep.store.nodes import node_public
from draftkeep.store.shard import read_shard
from draftkeep.store.storage import open_storage
from tests.crash.campaign.acks import read_acks
from tests.crash.campaign.roles import is_whole
from tests.crash.campaign.site import Site, node_name
from tests.crash.forking import ROOT

_OPENED = 50
_Key = tuple[bytes, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What is there in the end.

    `lost` were acknowledged, are of nobody who was erased, and are in no listed file; `doubled`
    are in listed files more than once; `in_kafka` is how many records the topic ever took.
    `unlisted` rows are in files and not in `trace_ids`, or the other way round; `undead` rows are
    an erased subject's; `strays` files that nothing lists; `damaged` bodies did not open to what
    was sealed; `complaint` is what `draftkeep catalog check` said, empty where all is well.
    """

    acknowledged: int
    stored: int
    lost: int
    doubled: int
    in_kafka: int
    unlisted: int
    undead: int
    strays: int
    damaged: int
    complaint: str

    def problems(self) -> list[str]:
        """What is wrong, in words; empty where every acknowledged trace is there exactly once."""
        found = [
            f"{value} {name}"
            for name in ("lost", "doubled", "unlisted", "undead", "strays", "damaged")
            if (value := getattr(self, name))
        ]
        if self.in_kafka < self.acknowledged:
            found.append(f"Kafka took {self.in_kafka} records of {self.acknowledged}")
        return [*found, *([self.complaint] if self.complaint else [])]


def count(site: Site, *, nodes: int, partitions: int) -> Count:
    """Count once nothing runs any more and the sweeper has been through."""
    acks: dict[_Key, bool] = {}
    for number in range(nodes):
        name = node_name(number)
        acks |= {
            (key, name): is_doomed for key, is_doomed in read_acks(site.acks_dir, name).items()
        }
    listed = _strings(site, "SELECT name FROM shards")
    files = [str(site.shards_dir / name) for name in listed]
    rows = _rows_in_files(files)
    lasting = {key for key, is_doomed in acks.items() if not is_doomed}
    return Count(
        acknowledged=len(acks),
        stored=len(rows),
        lost=len(lasting - set(rows)),
        doubled=sum(copies > 1 for copies in rows.values()),
        in_kafka=sum(end_offsets(site, partitions).values()),
        unlisted=len(set(rows) ^ _rows_in_catalog(site)),
        undead=_undead(site, files),
        strays=len({file.name for file in open_storage(site.config).list()} ^ set(listed)),
        damaged=_damaged(site, listed),
        complaint=_complaint(site),
    )


def end_offsets(site: Site, partitions: int) -> dict[int, int]:
    """How many records every partition ever took, as the broker says."""
    consumer = site.kafka.access.connect(KafkaConsumer, enable_auto_commit=False)
    try:
        wanted = [TopicPartition(site.config.kafka.topic, number) for number in range(partitions)]
        return {at.partition: end for at, end in consumer.end_offsets(wanted).items()}
    finally:
        consumer.close()


def _rows_in_files(files: list[str]) -> Counter[_Key]:
    if not files:
        return Counter()
    query = "SELECT trace_id, node, count(*) FROM read_parquet(?) GROUP BY ALL"
    with duckdb.connect() as connection:
        found = connection.execute(query, [files]).fetchall()
    return Counter({(trace_id, node): copies for trace_id, node, copies in found})


def _rows_in_catalog(site: Site) -> set[_Key]:
    query = sa.text("SELECT trace_id, node FROM trace_ids WHERE shard IS NOT NULL")
    with site.catalog.read() as connection:
        return {(bytes(row.trace_id), row.node) for row in connection.execute(query)}


def _strings(site: Site, query: str) -> list[str]:
    with site.catalog.read() as connection:
        return list(connection.scalars(sa.text(query)))


def _undead(site: Site, files: list[str]) -> int:
    """Rows of a subject that was erased."""
    query = sa.text("SELECT value FROM tombstones WHERE kind = 'alias'")
    with site.catalog.read() as connection:
        aliases = [bytes(value) for value in connection.scalars(query)]
    if not files or not aliases:
        return 0
    with duckdb.connect() as connection:
        connection.execute("CREATE TABLE erased (alias BLOB)")
        connection.executemany("INSERT INTO erased VALUES (?)", [[alias] for alias in aliases])
        found = connection.execute(
            "SELECT count(*) FROM read_parquet(?) WHERE alias IN (SELECT alias FROM erased)",
            [files],
        ).fetchone()
    assert found is not None
    return int(found[0])


def _damaged(site: Site, listed: list[str]) -> int:
    """Of a few traces from every part of the store, how many do not open to what was sealed."""
    opener = Opener(
        site.keyring.job_keys(),
        lambda node: node_public(site.catalog, node),
        clock=time.time,
    )
    storage = open_storage(site.config)
    damaged = opened = 0
    for name in listed:
        for number, sealed in enumerate(read_shard(storage, name)):
            if number == 3 or opened == _OPENED:
                break
            opened += 1
            damaged += not is_whole(opener.open(sealed))
    return damaged


def _complaint(site: Site) -> str:
    """What `draftkeep catalog check` has to say where it finds something."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
        "DRAFTKEEP_STATE_DIR": str(site.config.state_dir),
        "DRAFTKEEP_CATALOG__URL": site.config.catalog.url,
    }
    answer = subprocess.run(
        [sys.executable, "-m", "draftkeep", "catalog", "check"],
        env=environment,
        capture_output=True,
        text=True,
    )
    # The table's rows without its head.
    lines = [line for line in answer.stdout.splitlines() if line[:1] == "│" and "broken" in line]
    return "" if answer.returncode == 0 else "\n".join([*lines, answer.stderr])
