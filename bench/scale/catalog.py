"""Headers through a catalog, as the compactor commits them.

Every header is committed by the store's own functions: shard rows, trace ids and the log's offset
in one transaction. Four small shards of a bucket are then swapped for one, as a merge does.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import sqlalchemy as sa

from bench.scale.audit import ask
from bench.scale.points import Took, checkpoints, middle, timed
from bench.scale.probes import Probes
from bench.scale.run import PER_1000, Run
from bench.scale.traffic import TARGET, TRACE_BYTES, Batch, Traffic
from draftkeep.ingest.log import PartitionId
from draftkeep.store.catalog import Catalog
from draftkeep.store.database import insert_many
from draftkeep.store.nodes import enrol_node
from draftkeep.store.offsets import LogOffset, advance
from draftkeep.store.periods import publish_period
from draftkeep.store.rewriter import swap_shards
from draftkeep.store.schema import offsets, shards, trace_ids
from draftkeep.store.shard import ROW_GROUP_ROWS, ShardFile
from draftkeep.store.shard_rows import add_shard, list_shards
from draftkeep.store.storage_local import LocalStorage
from draftkeep.store.stored_file import SUFFIX

_LOG = PartitionId(cluster="bench", topic_id="headers", partition=0)
_MERGED = 4
_Written = tuple[int, ShardFile, Batch]


class Filling:
    """A catalog that is filled with headers; it goes on from what the catalog holds.

    With `readable` a shard is a Parquet file of the clear columns by the time that anything reads
    it; until then, and without, it is an empty file.
    """

    def __init__(
        self,
        run: Run,
        phase: str,
        catalog: Catalog,
        storage: LocalStorage,
        traffic: Traffic,
        *,
        readable: bool,
    ) -> None:
        self._run = run
        self._phase = phase
        self._catalog = catalog
        self._storage = storage
        self._readable = readable
        self._traffic = traffic
        self._commits: list[Took] = []
        self._swaps: list[Took] = []
        self._stored = self._read_stored()
        self._small = self._read_small()

    @property
    def done(self) -> int:
        """How many headers the catalog holds or has held."""
        return self._stored or 0

    def fill(self, total: int) -> None:
        """Commit headers up to `total`, and measure at the checkpoints."""
        run, phase = self._run, self._phase
        run.points.forget(phase, beyond=self.done)
        if self._stored is None:
            for name in self._traffic.node_names():
                public = name.encode().ljust(32, b"-")
                enrol_node(self._catalog, name, public, self._traffic.tenant_names(), 1.0)
        stops = [at for at in checkpoints(total) if not run.points.has(phase, "peak_rss", at)]
        window = max(1, checkpoints(total)[0] // run.sizes.batch)
        with run.bar(f"{phase}: headers", total) as bar:
            for stop in stops:
                while self.done < stop:
                    self._advance(min(run.sizes.batch, stop - self.done))
                    bar.at(self.done)
                    if len(self._commits) == window:
                        self._note()
                self._note()
                self._measure(stop)

    def _read_stored(self) -> int | None:
        with self._catalog.read() as connection:
            found: int | None = connection.scalar(
                sa.select(offsets.c.next).where(offsets.c.cluster == _LOG.cluster)
            )
        return found

    def _read_small(self) -> list[_Written]:
        with self._catalog.read() as connection:
            rows = list_shards(connection, shards.c.name.notlike("%merged%"))
        small = []
        for row in sorted(rows, key=lambda row: row.id):
            first = int(row.name.removesuffix(SUFFIX).rsplit("-", 1)[1])
            small.append((row.id, self._file(row.name, row.rows, row.bucket_s), first))
        return [
            (shard_id, file, self._traffic.batches(first, file.rows)[0])
            for shard_id, file, first in small
        ]

    def _advance(self, count: int) -> None:
        batches = self._traffic.batches(self.done, count)
        for batch in batches:
            if batch.first % self._traffic.per_bucket == 0:
                self._publish(self._traffic.bucket_of(batch.first))
        files = [self._touch(batch) for batch in batches]
        rows = [batch.trace_rows() for batch in batches]
        ids, took = timed(lambda: self._commit(batches, files, rows))
        # A short batch before a checkpoint would tell of its fixed costs.
        if count == self._run.sizes.batch or not self._commits:
            self._commits.append(took.over(count / 1000))
        for item in zip(ids, files, batches, strict=True):
            if len(self._small) == _MERGED or self._other_bucket(item[2]):
                self._swap()
            self._small.append(item)

    def _other_bucket(self, batch: Batch) -> bool:
        return bool(self._small) and self._small[0][2].bucket_s != batch.bucket_s

    def _commit(
        self,
        batches: Sequence[Batch],
        files: Sequence[ShardFile],
        rows: Sequence[list[dict[str, Any]]],
    ) -> list[int]:
        ids, following = [], batches[-1].first + len(batches[-1])
        offset = LogOffset(identity=_LOG, stored=self._stored, first=0, following=following)
        with self._catalog.begin(shared=True) as connection:
            advance(connection, offset, following, 1.0, [])
            for file, group in zip(files, rows, strict=True):
                shard_id = add_shard(connection, file, 1.0)
                insert_many(connection, trace_ids, [row | {"shard": shard_id} for row in group])
                ids.append(shard_id)
        self._stored = following
        return ids

    def _swap(self) -> None:
        """One shard for the small ones, which all are of one bucket."""
        batches = [batch for _, _, batch in self._small]
        ids = [shard_id for shard_id, _, _ in self._small]
        rows = sum(map(len, batches))
        bucket_s = batches[0].bucket_s
        file = self._file(_name(bucket_s, f"{batches[0].first:012}-merged"), rows, bucket_s)
        self._path(file).touch()
        if self._readable:
            _write_clear(pa.concat_tables([batch.table() for batch in batches]), self._path(file))

        with self._catalog.read() as connection:
            inputs = list_shards(connection, shards.c.id.in_(ids))

        def swap() -> None:
            with self._catalog.begin(shared=True) as connection:
                swap_shards(connection, inputs, file, set(), 1.0)

        self._swaps.append(timed(swap)[1].over(rows / 1000))
        for _, old, _ in self._small:
            old.remove()
        self._small.clear()

    def _touch(self, batch: Batch) -> ShardFile:
        file = self._file(_name(batch.bucket_s, f"{batch.first:012}"), len(batch), batch.bucket_s)
        self._path(file).parent.mkdir(parents=True, exist_ok=True)
        self._path(file).touch()
        return file

    def _file(self, name: str, rows: int, bucket_s: int) -> ShardFile:
        return ShardFile(
            storage=self._storage,
            name=name,
            bucket_s=bucket_s,
            target=TARGET,
            rows=rows,
            size_bytes=rows * TRACE_BYTES,
            sha256=os.urandom(32),
        )

    def _publish(self, bucket: int) -> None:
        for tenant in range(self._traffic.tenants):
            publish_period(self._catalog, self._traffic.period(bucket, tenant))

    def _note(self) -> None:
        for step, taken in (("commit", self._commits), ("swap", self._swaps)):
            if taken:
                self._run.add(self._phase, step, self.done, middle(taken), PER_1000)
                taken.clear()

    def _measure(self, at: int) -> None:
        self._run.add_peak(self._phase, at, "fill_rss")
        first = max(0, at - self._run.sizes.batch)
        last = self._traffic.batches(first, at - first)[-1]
        if self._readable:
            for _, file, batch in self._small:
                _write_clear(batch.table(), self._path(file))
            self._run.add_value(self._phase, "clear_bytes_a_trace", at, self._clear_bytes(), "B")
            ask(self._run, self._phase, at, self._catalog, self._storage, last)
        Probes(self._run, self._phase, self._catalog, self._storage).measure(at, last)
        self._run.add_peak(self._phase, at)

    def _clear_bytes(self) -> float:
        """What the clear columns of a trace take in the newest shard that is not small."""
        with self._catalog.read() as connection:
            listed = sorted(list_shards(connection), key=lambda row: (row.rows, row.id))
        return Path(self._storage.path(listed[-1].name)).stat().st_size / listed[-1].rows

    def _path(self, file: ShardFile) -> Path:
        return Path(self._storage.path(file.name))


def _name(bucket_s: int, serial: str) -> str:
    return f"{bucket_s}-{TARGET.hex()[:8]}-{serial}{SUFFIX}"


def _write_clear(table: pa.Table, path: Path) -> None:
    """As a shard writes its clear columns, in its order."""
    names = ("tenant", "domain", "created_s", "trace_id")
    order = pc.sort_indices(table, [(name, "ascending", "at_start") for name in names])
    pq.write_table(
        table.take(order),
        path,
        row_group_size=ROW_GROUP_ROWS,
        compression="zstd",
        use_dictionary=["tenant", "period_id", "share_id", "target", "tokenizer", "node", "domain"],
        write_statistics=["tenant", "created_s", "expiry_s", "domain"],
    )
