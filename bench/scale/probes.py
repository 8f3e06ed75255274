"""What a filled catalog costs: duplicates, admission, erasure, an idle sweep, expiry, bytes."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace

import sqlalchemy as sa

from bench.scale.points import Took, middle, timed
from bench.scale.run import MS, PER_1000, Run
from bench.scale.traffic import Batch
from draftkeep.ingest.header import Header
from draftkeep.policies.keyring import SubjectTrail
from draftkeep.policies.names import ID_BYTES
from draftkeep.store.catalog import Catalog
from draftkeep.store.erasure import finish_erasure, plan_erasure
from draftkeep.store.known_digests import known_digests
from draftkeep.store.nodes import load_nodes
from draftkeep.store.periods import load_periods
from draftkeep.store.schema import shards, trace_ids
from draftkeep.store.shard_rows import list_shards
from draftkeep.store.storage import Storage
from draftkeep.store.sweeper import Sweeper, SweepReport
from draftkeep.store.tombstones import erased_shards, load_tombstones

_SUBJECTS = 5
_TIMES = 5


class Probes:
    """Measures one catalog. An erasure leaves a tombstone, an expiry takes the oldest bucket."""

    def __init__(self, run: Run, phase: str, catalog: Catalog, storage: Storage) -> None:
        self._run = run
        self._phase = phase
        self._catalog = catalog
        self._storage = storage

    def measure(self, at: int, last: Batch) -> None:
        """Everything once, with `last` as the batch that is asked about."""
        run, phase, thousands = self._run, self._phase, len(last) / 1000
        headers = last.headers()
        facts = _often(lambda: self._facts(headers)).over(thousands)
        run.add(phase, "admission", at, facts, PER_1000)
        asked = [
            header if number % 2 else replace(header, trace_id=os.urandom(ID_BYTES))
            for number, header in enumerate(headers)
        ]
        run.add(phase, "lookup", at, _often(lambda: self._lookup(asked)).over(thousands), PER_1000)
        columns = (last.columns[name] for name in ("alias", "period_id", "tenant"))
        subjects = list(dict.fromkeys(zip(*columns, strict=True)))[:_SUBJECTS]
        run.add(phase, "erase", at, middle(self._erase(*subject) for subject in subjects), MS)
        run.add(phase, "find_erased", at, _often(self._find_erased), MS)
        run.add(phase, "idle_sweep", at, self._sweep(0.0)[1], MS)
        self.expire_oldest(at, last.bucket_s)
        size_bytes, rows = self._size_bytes(), self._count(trace_ids)
        run.add_value(phase, "bytes_a_trace", at, size_bytes / max(1, rows), "B")

    def expire_oldest(self, at: int, still_open_s: int) -> None:
        """Sweep at the expiry of the oldest bucket, unless it is the one that is being filled."""
        with self._catalog.read() as connection:
            oldest_s = connection.scalar(sa.select(sa.func.min(shards.c.bucket_s)))
        if oldest_s is None or oldest_s == still_open_s:
            return
        report, took = self._sweep(float(oldest_s))
        self._run.add(self._phase, "expire", at, took.over(report.trace_ids / 1000), PER_1000)

    def _sweep(self, now_s: float) -> tuple[SweepReport, Took]:
        # All files are young by this clock: an orphan would be removed by none of these sweeps.
        sweeper = Sweeper(self._catalog, self._storage, clock=lambda: now_s, grace_s=1e12)
        return timed(sweeper.run_once)

    def _lookup(self, headers: Sequence[Header]) -> None:
        """The compactor's question about duplicates; half of these ids are stored."""
        with self._catalog.read() as connection:
            known_digests(connection, headers)

    def _facts(self, headers: Sequence[Header]) -> None:
        with self._catalog.read() as connection:
            load_periods(connection, {header.period_id for header in headers})
            load_nodes(connection)
            load_tombstones(connection, headers)

    def _erase(self, alias: bytes, period_id: bytes, tenant: str) -> Took:
        """The catalog's part of erasing a subject of one period: two transactions."""
        erasure_id = os.urandom(ID_BYTES)

        def erase() -> None:
            plan_erasure(
                self._catalog,
                tenant=tenant,
                reference=erasure_id,
                look=lambda _: SubjectTrail(used=((period_id, alias),), others=()),
                now_s=1.0,
                fresh_id=erasure_id,
            )
            finish_erasure(self._catalog, erasure_id, keys_destroyed=0, now_s=1.0)

        return timed(erase)[1]

    def _find_erased(self) -> None:
        with self._catalog.read() as connection:
            list_shards(connection, shards.c.id.in_(erased_shards()))

    def _count(self, table: sa.Table) -> int:
        with self._catalog.read() as connection:
            return connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0

    def _size_bytes(self) -> int:
        """What `trace_ids` and its indexes occupy; in SQLite, where one cannot tell, everything."""
        with self._catalog.read() as connection:
            if connection.dialect.name == "postgresql":
                query = sa.text("SELECT pg_total_relation_size('trace_ids')")
            else:
                query = sa.text(
                    "SELECT (page_count - freelist_count) * page_size FROM pragma_page_count, "
                    "pragma_freelist_count, pragma_page_size"
                )
            return int(connection.scalar(query) or 0)


def _often(work: Callable[[], object]) -> Took:
    return middle(timed(work)[1] for _ in range(_TIMES))
