"""Rewriting shards: without erased rows, or several small ones as one.

A shard is never changed: a file is written, and one transaction swaps the rows of the catalog.
Inputs are unlinked after that. No copy of what was removed is kept. A shard that is damaged is
said and left as it is, and the others go on.
"""

import logging
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.errors import ConflictError, ShardError
from draftkeep.store.catalog import CHUNK, Catalog
from draftkeep.store.periods import past_periods
from draftkeep.store.schema import shards, trace_ids
from draftkeep.store.shard import ShardFile
from draftkeep.store.shard_merge import merge_groups, merge_tables
from draftkeep.store.shard_rows import (
    ShardRow,
    add_shard,
    list_shards,
    lock_shards,
    remove_shards,
    require_present,
    require_whole,
)
from draftkeep.store.shard_writer import write_tables
from draftkeep.store.storage import Storage
from draftkeep.store.tombstones import erased_shards, erased_traces

_Key = tuple[bytes, str]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewriteReport:
    """Shards read and written, rows left out, and bytes given back (negative: grown).

    `damaged` are shards left as they are, since they are not what was listed: an alarm, which was
    logged.
    """

    replaced: int = 0
    written: int = 0
    rows_removed: int = 0
    bytes_freed: int = 0
    damaged: int = 0

    def __add__(self, other: "RewriteReport") -> "RewriteReport":
        return RewriteReport(
            replaced=self.replaced + other.replaced,
            written=self.written + other.written,
            rows_removed=self.rows_removed + other.rows_removed,
            bytes_freed=self.bytes_freed + other.bytes_freed,
            damaged=self.damaged + other.damaged,
        )


def random_serial() -> str:
    """A name no other file has."""
    return uuid.uuid4().hex


def rewrite_erased(
    catalog: Catalog,
    storage: Storage,
    *,
    now_s: float,
    new_serial: Callable[[], str],
    stopped: Callable[[], bool] = lambda: False,
) -> RewriteReport:
    """Rewrite every shard that holds an erased row or one past a shortened deadline.

    A shard past its own deadline is left to the sweeper, which copies nothing. `stopped` is asked
    before each shard and ends the pass. Raises ConflictError when another process replaced a shard
    meanwhile; what was done stays done.
    """
    with catalog.read() as connection:
        past = sa.select(trace_ids.c.shard).where(
            trace_ids.c.shard.is_not(None), trace_ids.c.period_id.in_(past_periods(int(now_s)))
        )
        inputs = list_shards(
            connection,
            shards.c.bucket_s > int(now_s),
            sa.or_(shards.c.id.in_(erased_shards()), shards.c.id.in_(past)),
        )
    report = RewriteReport()
    for shard in inputs:
        if stopped():
            break
        report += _replace_sound(catalog, storage, [shard], 1, now_s=now_s, new_serial=new_serial)
    return report


def merge(
    catalog: Catalog,
    storage: Storage,
    *,
    target_bytes: int,
    now_s: float,
    new_serial: Callable[[], str],
    stopped: Callable[[], bool] = lambda: False,
) -> RewriteReport:
    """Join shards smaller than `target_bytes`, within one bucket and target only.

    A large one waits until there are small ones of half its size, so that a trace is copied a
    number of times that grows with the logarithm of what is stored, not with every batch.

    `stopped` is asked before each run of shards, which is of about `target_bytes`. Raises
    ConflictError like `rewrite_erased`.
    """
    with catalog.read() as connection:
        small = list_shards(
            connection, shards.c.bytes < target_bytes, shards.c.bucket_s > int(now_s)
        )
    report = RewriteReport()
    for group in merge_groups(small, target_bytes):
        if stopped():
            break
        report += _replace_sound(catalog, storage, group, 2, now_s=now_s, new_serial=new_serial)
    return report


def _replace_sound(
    catalog: Catalog,
    storage: Storage,
    inputs: Sequence[ShardRow],
    at_least: int,
    *,
    now_s: float,
    new_serial: Callable[[], str],
) -> RewriteReport:
    """Replace those of `inputs` that are what was listed, if they are enough."""
    sound: list[ShardRow] = []
    report = RewriteReport()
    for shard in inputs:
        try:
            require_whole(storage, shard)
        except FileNotFoundError:
            # Replaced meanwhile, or lost: the sweeper says which.
            continue
        except ShardError as error:
            report += _damaged(error, [shard])
        else:
            sound.append(shard)
    if len(sound) < at_least:
        return report
    try:
        return report + _replace(catalog, storage, sound, now_s=now_s, serial=new_serial())
    except ShardError as error:
        return report + _damaged(error, sound)


def _damaged(error: ShardError, inputs: Sequence[ShardRow]) -> RewriteReport:
    _log.error("not merged and not rewritten: %s", error)
    return RewriteReport(damaged=len(inputs))


def _replace(
    catalog: Catalog, storage: Storage, inputs: Sequence[ShardRow], *, now_s: float, serial: str
) -> RewriteReport:
    ids = [shard.id for shard in inputs]
    with catalog.read() as connection:
        dead = _dead_keys(connection, ids, now_s)
        known = _count_traces(connection, ids)
    file = _copy(storage, inputs, dead, serial)
    try:
        _require_rows(inputs, 0 if file is None else file.rows, known - len(dead))
        with catalog.begin(shared=True) as connection:
            swap_shards(connection, inputs, file, dead, now_s)
    except (ConflictError, ShardError):
        if file is not None:
            file.remove()
        raise
    storage.remove(shard.name for shard in inputs)
    return RewriteReport(
        replaced=len(inputs),
        written=0 if file is None else 1,
        rows_removed=len(dead),
        bytes_freed=sum(shard.size_bytes for shard in inputs)
        - (0 if file is None else file.size_bytes),
    )


def _copy(
    storage: Storage, inputs: Sequence[ShardRow], dead: set[_Key], serial: str
) -> ShardFile | None:
    """The living rows of `inputs` as one file; None where no row lives."""
    first = inputs[0]
    tables = merge_tables(storage, [shard.name for shard in inputs], dead=dead)
    try:
        return write_tables(
            storage, tables, bucket_s=first.bucket_s, target=first.target, serial=serial
        )
    except FileNotFoundError:
        raise ConflictError("a shard was replaced by another process; start again") from None


def swap_shards(
    connection: Connection,
    inputs: Sequence[ShardRow],
    file: ShardFile | None,
    dead: set[_Key],
    now_s: float,
) -> None:
    """List `file` in place of `inputs`, which are of one bucket, and move their traces to it.

    `dead`, by trace id and node, are those of their traces that the file leaves out; without a
    file they are all of them. Raises ConflictError where a shard or a trace left the catalog
    meanwhile, or the file is gone; the caller's transaction is then to be given up.
    """
    row = trace_ids.c
    ids = [shard.id for shard in inputs]
    lock_shards(connection, ids)
    if dead:
        connection.execute(
            sa.update(trace_ids)
            .where(
                row.bucket_s == inputs[0].bucket_s,
                row.trace_id == sa.bindparam("dead_id"),
                row.node == sa.bindparam("dead_node"),
            )
            .values(shard=None),
            [{"dead_id": trace_id, "dead_node": node} for trace_id, node in sorted(dead)],
        )
    fresh = None
    if file is not None:
        require_present(file)
        fresh = add_shard(connection, file, now_s)
    moved = connection.execute(
        sa.update(trace_ids).where(row.shard.in_(ids)).values(shard=fresh)
    ).rowcount
    if moved != (0 if file is None else file.rows):
        raise ConflictError("traces of a shard left the catalog meanwhile; start again")
    remove_shards(connection, ids)


def _require_rows(inputs: Sequence[ShardRow], rows: int, expected: int) -> None:
    """A file with more or fewer rows than the catalog has traces would hide what is wrong."""
    if rows != expected:
        raise ShardError(
            f"{', '.join(shard.name for shard in inputs)}: {rows} living rows, and the catalog has "
            f"{expected} traces of them; restore catalog and shards from one backup"
        )


def _count_traces(connection: Connection, ids: Sequence[int]) -> int:
    query = sa.select(sa.func.count()).where(trace_ids.c.shard.in_(ids))
    return connection.scalar(query) or 0


def _dead_keys(connection: Connection, ids: Sequence[int], now_s: float) -> set[_Key]:
    row = trace_ids.c
    dead: set[_Key] = set()
    for start in range(0, len(ids), CHUNK):
        query = sa.select(row.trace_id, row.node).where(
            row.shard.in_(ids[start : start + CHUNK]), _dead(now_s)
        )
        dead.update((found.trace_id, found.node) for found in connection.execute(query))
    return dead


def _dead(now_s: float) -> sa.ColumnElement[bool]:
    return sa.or_(erased_traces(), trace_ids.c.period_id.in_(past_periods(int(now_s))))
