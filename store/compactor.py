"""Compactor: log to shards, exactly once, without a key.

One run reads a batch, judges it, writes its shards to disk, and then commits shard rows, trace ids,
dead letters, gaps and the new log offset in one catalog transaction. The offset is compared
and set, so of two compactors on one log one wins and the other starts again. A crash anywhere
leaves at worst files the catalog does not know, which the sweeper removes, and records the log
still holds, which the next run reads again.
"""

import gc
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.errors import ConflictError, StoreError
from draftkeep.ingest.log import Log
from draftkeep.ingest.record import encode_record
from draftkeep.store.admission import (
    COUNTED_ONLY,
    Admission,
    Candidate,
    Refusal,
    Refused,
    judge_again,
    parse,
)
from draftkeep.store.catalog import Catalog
from draftkeep.store.database import insert_many
from draftkeep.store.dead_letters import add_dead_letters
from draftkeep.store.drops import add_drops
from draftkeep.store.known_digests import known_digests
from draftkeep.store.log_deletion_rows import note_erased
from draftkeep.store.offsets import LogOffset, advance, locate, note_gaps
from draftkeep.store.ownership import claim
from draftkeep.store.rewriter import random_serial
from draftkeep.store.schema import trace_ids
from draftkeep.store.shard import ShardFile
from draftkeep.store.shard_rows import add_shard, require_present
from draftkeep.store.shard_writer import write_shard
from draftkeep.store.storage import Storage

LIMIT_RECORDS = 4096
LIMIT_BYTES = 64 * 1024**2
_ATTEMPTS = 5
# What an honest node and a sound broker never send.
_ALARMING = frozenset({Refusal.CONFLICT, Refusal.BAD_SIGNATURE, Refusal.UNKNOWN_NODE})

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactReport:
    """What one run did. `dead` and `counted` are by reason; `gaps` are [first, next) offsets.

    `lag` is how many offsets the log was ahead of `next_offset` when the run began; 0 where it
    gave no record.
    """

    read: int
    stored: int
    duplicates: int
    counted: Mapping[str, int]
    dead: Mapping[str, int]
    gaps: tuple[tuple[int, int], ...]
    shards: tuple[str, ...]
    next_offset: int
    lag: int

    @property
    def lost(self) -> int:
        """How many offsets the log no longer had when they were due."""
        return sum(following - first for first, following in self.gaps)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """A batch, sorted into what is stored, what is refused, and what was here before."""

    stored: tuple[Candidate, ...]
    refused: tuple[Refused, ...]
    duplicates: int


class Compactor:
    """Moves records from one log into shards.

    `issuer_public` verifies period records. `new_serial` draws the unique part of a shard's name.
    With `free` the log gives up what was committed; a log that others read as well is left alone.
    Not for several threads at once; several processes may each have one.
    """

    def __init__(
        self,
        log: Log,
        catalog: Catalog,
        storage: Storage,
        *,
        clock: Callable[[], float],
        issuer_public: bytes,
        new_serial: Callable[[], str] = random_serial,
        free: bool = True,
        limit_records: int = LIMIT_RECORDS,
        limit_bytes: int = LIMIT_BYTES,
    ) -> None:
        self._log = log
        self._catalog = catalog
        self._storage = storage
        self._clock = clock
        self._issuer_public = issuer_public
        self._new_serial = new_serial
        self._free = free
        self._limit_records = limit_records
        self._limit_bytes = limit_bytes

    def run_once(self) -> CompactReport:
        """Move one batch; `read` 0 in the report means that the log has no more.

        Raises ConflictError when another compactor moved this log on meanwhile (start again),
        LogReplacedError when the log is not the one that was read before, and StoreError where log
        or catalog cannot be used, or the shards in the storage are another catalog's.
        """
        offset = locate(self._catalog, self._log)
        records = []
        if offset.start < offset.following:
            records = self._log.read(offset.start, self._limit_records, self._limit_bytes)
        read = len(records)
        gaps, following = note_gaps(offset, [record.offset for record in records], self._log)
        plan = _Plan(stored=(), refused=(), duplicates=0)
        files: tuple[ShardFile, ...] = ()
        if following != offset.stored:
            with _no_collections():
                candidates, unreadable = parse(records)
                plan, files = self._store(candidates, unreadable, offset, gaps, following)
        if self._free and offset.first < following:
            self._log.free(following)
        self._alarm(offset, gaps, plan)
        reasons = Counter(str(item.reason) for item in plan.refused)
        return CompactReport(
            read=read,
            stored=len(plan.stored),
            duplicates=plan.duplicates,
            counted={name: n for name, n in reasons.items() if name in COUNTED_ONLY},
            dead={name: n for name, n in reasons.items() if name not in COUNTED_ONLY},
            gaps=tuple(gaps),
            shards=tuple(file.name for file in files),
            next_offset=following,
            # Where nothing came, what is left holds no record, such as the end of a transaction. It
            # is passed with the record after it: a broker that has just become leader may not
            # show its last ones yet.
            lag=max(0, offset.following - following) if read else 0,
        )

    def _alarm(self, offset: LogOffset, gaps: list[tuple[int, int]], plan: _Plan) -> None:
        """Say what is committed and needs a person: records that are lost, or that lie."""
        if offset.stored is None and offset.first:
            _log.warning(
                "partition %d of %s is met for the first time and begins at offset %d; whether "
                "something was lost before that cannot be known",
                offset.identity.partition,
                offset.topic_name,
                offset.first,
            )
        for first, following in gaps:
            _log.error(
                "LOST: partition %d of %s no longer has the offsets %d to %d (%d), which were not "
                "compacted; its retention is too short, or somebody deleted records",
                offset.identity.partition,
                offset.topic_name,
                first,
                following - 1,
                following - first,
            )
        alarming = Counter(str(item.reason) for item in plan.refused if item.reason in _ALARMING)
        for reason, count in sorted(alarming.items()):
            _log.error(
                "partition %d of %s has %d records that no honest node writes: %s; they are kept "
                "as dead letters",
                offset.identity.partition,
                offset.topic_name,
                count,
                reason,
            )

    def close(self) -> None:
        """Close the log. Harmless when repeated."""
        self._log.close()

    def _store(
        self,
        candidates: list[Candidate],
        unreadable: list[Refused],
        offset: LogOffset,
        gaps: list[tuple[int, int]],
        following: int,
    ) -> tuple[_Plan, tuple[ShardFile, ...]]:
        """Write and commit; plans again when a trace id was stored from another log meanwhile."""
        # For each batch and not once: a disk may be unmounted under a process that runs on. A round
        # that finds nothing asks nothing.
        claim(self._catalog, self._storage)
        for _ in range(_ATTEMPTS):
            now_s = self._clock()
            plan = self._plan(candidates, unreadable, now_s)
            files = self._write(plan.stored)
            try:
                with self._catalog.begin(shared=True) as connection:
                    advance(connection, offset, following, now_s, gaps)
                    plan = replace(plan, refused=judge_again(connection, plan.refused))
                    self._record(connection, plan, files, offset, now_s)
            except sa.exc.IntegrityError:
                _discard(files)
                continue
            except ConflictError:
                _discard(files)
                raise
            return plan, tuple(file for file, _ in files)
        raise StoreError(
            f"a batch met fresh duplicates {_ATTEMPTS} times; another log carries the same traces: "
            "stop one compactor and run this one again"
        )

    def _plan(self, candidates: list[Candidate], unreadable: list[Refused], now_s: float) -> _Plan:
        with self._catalog.read() as connection:
            admission = Admission.load(
                connection,
                candidates,
                issuer_public=self._issuer_public,
                now_s=now_s,
            )
            known = known_digests(connection, [item.header for item in candidates])
        stored, refused, duplicates = [], list(unreadable), 0
        for item in candidates:
            reason = admission.judge(item)
            if reason is None and item.key in known:
                if known[item.key] == item.digest:
                    duplicates += 1
                    continue
                reason = Refusal.CONFLICT
            if reason is not None:
                refused.append(_refuse(item, reason))
                continue
            known[item.key] = item.digest
            stored.append(item)
        return _Plan(stored=tuple(stored), refused=tuple(refused), duplicates=duplicates)

    def _write(self, stored: Iterable[Candidate]) -> list[tuple[ShardFile, list[Candidate]]]:
        groups: dict[tuple[int, bytes], list[Candidate]] = {}
        for item in stored:
            groups.setdefault((item.header.expiry_s, item.header.target), []).append(item)
        return [
            (
                write_shard(
                    self._storage,
                    [(item.header, item.sealed) for item in items],
                    bucket_s=bucket_s,
                    target=target,
                    serial=self._new_serial(),
                ),
                items,
            )
            for (bucket_s, target), items in groups.items()
        ]

    def _record(
        self,
        connection: Connection,
        plan: _Plan,
        files: list[tuple[ShardFile, list[Candidate]]],
        offset: LogOffset,
        now_s: float,
    ) -> None:
        rows = []
        for file, items in files:
            require_present(file)
            shard_id = add_shard(connection, file, now_s)
            rows += [_trace_row(item, shard_id) for item in items]
        if rows:
            # In one order for all: two compactors with the same traces wait, and never in a ring.
            rows.sort(key=_row_key)
            insert_many(connection, trace_ids, rows)
        dead = [item for item in plan.refused if item.reason not in COUNTED_ONLY]
        without_room = add_dead_letters(connection, dead, log=offset.identity, now_s=now_s)
        counted = Counter(str(item.reason) for item in plan.refused if item.reason in COUNTED_ONLY)
        add_drops(connection, "compactor", counted + without_room, now_s)
        erased = [item.offset for item in plan.refused if item.reason is Refusal.ERASED]
        if erased:
            note_erased(connection, offset.identity, max(erased) + 1)


def _trace_row(item: Candidate, shard_id: int) -> dict[str, Any]:
    bucket_s, trace_id, node = item.key
    return {
        "bucket_s": bucket_s,
        "trace_id": trace_id,
        "node": node,
        "digest": item.digest,
        "tenant": item.header.tenant,
        "alias": item.header.alias,
        "period_id": item.header.period_id,
        "positions": item.header.positions,
        "shard": shard_id,
    }


def _row_key(row: dict[str, Any]) -> tuple[int, bytes, str]:
    return row["bucket_s"], row["trace_id"], row["node"]


def _refuse(item: Candidate, reason: Refusal) -> Refused:
    return Refused(
        offset=item.offset,
        data=encode_record(item.sealed),
        header=item.header,
        reason=reason,
        detail="",
    )


@contextmanager
def _no_collections() -> Iterator[None]:
    """Python's cycle collector waits meanwhile: a batch makes a dozen objects a record and no
    cycles, and looking through them again and again takes a tenth of the whole time.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _discard(files: list[tuple[ShardFile, list[Candidate]]]) -> None:
    # Only after a transaction that certainly did not commit: an unknown outcome leaves the files
    # to the sweeper, which asks the catalog.
    for file, _ in files:
        file.remove()
