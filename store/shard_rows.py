"""Shard rows: the catalog's side of a shard file. A file counts only once its row is committed."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.errors import ConflictError, ShardError
from draftkeep.store.schema import shards
from draftkeep.store.shard import SHARD_FORMAT, ShardFile
from draftkeep.store.storage import Storage

_REPLACED = "a shard was replaced or swept by another process; start again"
_CHUNK_BYTES = 4 * 1024**2


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardRow:
    """A shard as the catalog lists it."""

    id: int
    name: str
    bucket_s: int
    target: bytes
    rows: int
    size_bytes: int
    sha256: bytes


def list_shards(connection: Connection, *conditions: sa.ColumnElement[bool]) -> list[ShardRow]:
    """The shards that meet all conditions, those that live longest first, then by age."""
    query = sa.select(shards).where(*conditions).order_by(shards.c.bucket_s.desc(), shards.c.id)
    return [
        ShardRow(
            id=row.id,
            name=row.name,
            bucket_s=row.bucket_s,
            target=row.target,
            rows=row.rows,
            size_bytes=row.bytes,
            sha256=row.sha256,
        )
        for row in connection.execute(query)
    ]


def add_shard(connection: Connection, file: ShardFile, now_s: float) -> int:
    """List a shard file; returns its id."""
    result = connection.execute(
        sa.insert(shards).values(
            name=file.name,
            format=SHARD_FORMAT,
            bucket_s=file.bucket_s,
            target=file.target,
            rows=file.rows,
            bytes=file.size_bytes,
            sha256=file.sha256,
            created_s=now_s,
        )
    )
    key = result.inserted_primary_key
    assert key is not None  # noqa: S101 - a single-row INSERT always has one
    return int(key[0])


def lock_shards(connection: Connection, ids: Sequence[int]) -> None:
    """Keep others that replace these shards out until the transaction ends.

    Rows are locked in one order, so two that overlap wait and never in a ring. Raises
    ConflictError unless all of them are listed.
    """
    query = sa.select(shards.c.id).where(shards.c.id.in_(ids)).order_by(shards.c.id)
    if len(connection.scalars(query.with_for_update()).all()) != len(ids):
        raise ConflictError(_REPLACED)


def file_digest(storage: Storage, name: str) -> bytes:
    """The SHA-256 of a whole file. FileNotFoundError where it is not there."""
    digest = hashlib.sha256()
    with storage.open(name) as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.digest()


def require_whole(storage: Storage, shard: ShardRow) -> None:
    """Raise ShardError unless the file is byte for byte what was listed.

    Asked before a shard is copied: the copy has a digest of its own, and nobody could tell any
    more that its source was damaged. FileNotFoundError where the file is not there.
    """
    if file_digest(storage, shard.name) != shard.sha256:
        raise ShardError(
            f"{shard.name} in {storage.place} is damaged: its SHA-256 is not {shard.sha256.hex()}; "
            "restore it from a backup, or delete its row"
        )


def require_present(file: ShardFile) -> None:
    """Refuse to list a file that the sweeper took for an orphan.

    Called inside the write transaction, whose lock the sweeper holds alone while it unlinks: so a
    listed file exists, however long its writer slept between writing and committing.
    """
    if not file.exists():
        raise ConflictError(
            f"{file.name} was swept before it was committed; start again, and raise the "
            "sweeper's grace_s above the time a batch takes"
        )


def remove_shards(connection: Connection, ids: Sequence[int]) -> None:
    """Take shards off the list; raises ConflictError unless all of them are on it."""
    removed = connection.execute(sa.delete(shards).where(shards.c.id.in_(ids))).rowcount
    if removed != len(ids):
        raise ConflictError(_REPLACED)
