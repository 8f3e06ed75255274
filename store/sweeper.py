"""Sweeper: what is past its deadline goes, and files that nothing lists go.

Expiry takes rows off the catalog first and unlinks afterwards; a crash in between leaves files
that nothing lists, which the next sweep removes. Of the rows the trace ids go first, some at a
time, and then their shards: a late record of such a trace is refused by the clock, and no reader
asks for the shard any more. Both wait for no other writer but one that changes the same rows.
"""

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import sqlalchemy as sa

from draftkeep.store.catalog import CHUNK, Catalog
from draftkeep.store.ownership import claim
from draftkeep.store.schema import dead_letters, shards, trace_ids
from draftkeep.store.shard_rows import ShardRow, list_shards, remove_shards
from draftkeep.store.storage import Storage
from draftkeep.store.stored_file import SUFFIX, StoredFile

GRACE_S = 3600.0
# Trace ids that go in one transaction, a fraction of a second.
_BATCH_IDS = 10_000
# Files that are removed under the writers' lock. Two rounds of an object store's answers: no other
# writer waits for long, and the database does not take the session for dead and give its lock away.
_BATCH_FILES = 16
# SQLite's writers look for its lock now and then, and not in a queue.
_PAUSE_S = 0.02

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """What one sweep removed. `missing` are listed shards whose file is not there: an alarm,
    which the sweep has logged.
    """

    shards: int
    bytes_freed: int
    trace_ids: int
    dead_letters: int
    orphans: int
    missing: tuple[str, ...]


class Sweeper:
    """Removes expired shards, orphan files and expired dead letters.

    A file that the catalog does not list is removed once it is `grace_s` older than the clock, by
    its modification time as the storage tells it. That only spares work in progress; safety does
    not rest on it: the check and the removal happen under the writers' lock, and a writer that
    comes to commit afterwards finds its file gone and starts again. Only files named like shards,
    finished or temporary, are ever touched. `pause` is called between two transactions of a long
    chore, for others that want to write.
    """

    def __init__(
        self,
        catalog: Catalog,
        storage: Storage,
        *,
        clock: Callable[[], float],
        grace_s: float = GRACE_S,
        pause: Callable[[], None] = lambda: time.sleep(_PAUSE_S),
    ) -> None:
        self._catalog = catalog
        self._storage = storage
        self._clock = clock
        self._grace_s = grace_s
        self._pause = pause

    def run_once(self) -> SweepReport:
        """One sweep over everything. Raises StoreError where the shards are another catalog's."""
        claim(self._catalog, self._storage)
        now_s = self._clock()
        names, freed, ids, letters = self._expire(now_s)
        self._storage.remove(names)
        # Asked before the storage is: a file is there before it is listed.
        with self._catalog.read() as connection:
            listed = set(connection.scalars(sa.select(shards.c.name)))
        files = self._storage.list()
        orphans = self._remove_orphans(files, now_s)
        return SweepReport(
            shards=len(names),
            bytes_freed=freed,
            trace_ids=ids,
            dead_letters=letters,
            orphans=orphans,
            missing=self._missing(listed - {file.name for file in files}),
        )

    def _expire(self, now_s: float) -> tuple[list[str], int, int, int]:
        ids = sum(self._expire_ids(bucket_s) for bucket_s in self._past_buckets(now_s))
        expired: list[ShardRow] = []
        with self._catalog.begin(shared=True) as connection:
            # Whoever replaces a shard, or stores a trace in it, needs its row.
            query = sa.select(shards.c.id).where(shards.c.bucket_s <= int(now_s))
            due = connection.scalars(query.order_by(shards.c.id).with_for_update()).all()
            for start in range(0, len(due), CHUNK):
                chunk = due[start : start + CHUNK]
                expired += list_shards(connection, shards.c.id.in_(chunk))
                # What a compactor whose clock is behind has stored since.
                late = sa.delete(trace_ids).where(trace_ids.c.shard.in_(chunk))
                ids += connection.execute(late).rowcount
                remove_shards(connection, chunk)
            letters = connection.execute(
                sa.delete(dead_letters).where(dead_letters.c.expiry_s <= int(now_s))
            ).rowcount
        freed = sum(shard.size_bytes for shard in expired)
        return [shard.name for shard in expired], freed, ids, letters

    def _past_buckets(self, now_s: float) -> list[int]:
        bucket, found = trace_ids.c.bucket_s, []
        query = sa.select(sa.func.min(bucket)).where(bucket <= int(now_s))
        with self._catalog.read() as connection:
            least = connection.scalar(query)
            while least is not None:
                found.append(int(least))
                least = connection.scalar(query.where(bucket > least))
        return found

    def _expire_ids(self, bucket_s: int) -> int:
        """Delete the trace ids of a bucket, in their order and some at a time."""
        row, removed, after = trace_ids.c, 0, b""
        while True:
            due = sa.and_(row.bucket_s == bucket_s, row.trace_id > after)
            last = sa.select(row.trace_id).where(due).order_by(row.trace_id)
            with self._catalog.begin(shared=True) as connection:
                until = connection.scalar(last.offset(_BATCH_IDS - 1).limit(1))
                chosen = due if until is None else sa.and_(due, row.trace_id <= until)
                removed += connection.execute(sa.delete(trace_ids).where(chosen)).rowcount
            if until is None:
                return removed
            after = until
            self._pause()

    def _remove_orphans(self, files: Iterable[StoredFile], now_s: float) -> int:
        before_s = now_s - self._grace_s
        suspects = find_orphans(self._catalog, self._storage, files, before_s=before_s)
        removed = 0
        for start in range(0, len(suspects), _BATCH_FILES):
            names = suspects[start : start + _BATCH_FILES]
            if start:
                self._pause()
            with self._catalog.begin() as connection:
                query = sa.select(shards.c.name).where(shards.c.name.in_(names))
                orphans = set(names) - set(connection.scalars(query))
                self._storage.remove(orphans)
            removed += len(orphans)
        return removed

    def _missing(self, absent: set[str]) -> tuple[str, ...]:
        if not absent:
            return ()
        # A shard replaced between the two looks is not missing: only what is still listed counts.
        with self._catalog.read() as connection:
            still = set(connection.scalars(sa.select(shards.c.name)))
        missing = tuple(sorted(absent & still))
        if missing:
            _log.error(
                "LOST: %d listed shards have no file in %s, %s the first; draftkeep catalog check "
                "names them all. Restore them from a backup",
                len(missing),
                self._storage.place,
                missing[0],
            )
        return missing


def find_orphans(
    catalog: Catalog, storage: Storage, files: Iterable[StoredFile], *, before_s: float
) -> list[str]:
    """Names of shard `files`, finished or temporary, older than `before_s` that nothing lists.

    Asked outside the writers' lock: a writer may be about to list one.
    """
    old = [
        file.name for file in files if file.name.endswith(SUFFIX) and file.modified_s <= before_s
    ]
    with catalog.read() as connection:
        listed = set(connection.scalars(sa.select(shards.c.name)))
    # A file that was replaced since the files were listed is gone, or goes without help.
    return sorted(name for name in old if name not in listed and storage.exists(name))
