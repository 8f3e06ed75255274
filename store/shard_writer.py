"""Writing a shard: rows in order, a row group at a time, digested on their way."""

import hashlib
import io
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from draftkeep.errors import StoreError
from draftkeep.ingest.header import FIELD_NAMES, Header
from draftkeep.ingest.record import SealedTrace
from draftkeep.store import shard
from draftkeep.store.shard import SCHEMA, SHARD_FORMAT, ShardFile
from draftkeep.store.storage import Storage
from draftkeep.store.stored_file import SUFFIX

Row = tuple[Header, SealedTrace]
SortKey = tuple[str, str, int, bytes, str]

_SEALED = ("nonce", "ciphertext", "commitment", "signature", "encapsulation")
_OPTIONS: dict[str, Any] = {
    "compression": {name: "none" if name in _SEALED else "zstd" for name in SCHEMA.names},
    "use_dictionary": ["tenant", "period_id", "share_id", "target", "tokenizer", "node", "domain"],
    "write_statistics": ["tenant", "created_s", "expiry_s", "domain"],
}
_header_values = attrgetter(*FIELD_NAMES)
_seal_values = attrgetter("nonce", "ciphertext", "commitment", "signature")


class _Digest(io.RawIOBase):
    """A stream that counts and digests what it passes on. Closing it leaves the other open."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size_bytes = 0
        self.sha256 = hashlib.sha256()

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.sha256.update(data)
        self._file.write(data)
        self.size_bytes += len(data)
        return len(data)


def sort_key(header: Header) -> SortKey:
    """What a shard's rows are sorted by."""
    return header.tenant, header.domain or "", header.created_s, header.trace_id, header.node


def write_shard(
    storage: Storage, rows: Iterable[Row], *, bucket_s: int, target: bytes, serial: str
) -> ShardFile:
    """Write rows of one expiry (`bucket_s`, Unix seconds) and target, in any order, as one file.

    A row is a sealed trace with its header, parsed. Raises StoreError when there are none, and
    when one is of another target; otherwise like `write_tables`.
    """
    ordered = sorted(rows, key=lambda row: sort_key(row[0]))
    for header, _ in ordered:
        if header.target != target:
            raise StoreError(
                f"a record of target {header.target.hex()[:8]} was given for a shard of target "
                f"{target.hex()[:8]}; group records by target"
            )
    file = write_tables(storage, _tables(ordered), bucket_s=bucket_s, target=target, serial=serial)
    if file is None:
        raise StoreError("a shard of no records was asked for; write at least one")
    return file


def write_tables(
    storage: Storage, tables: Iterable[pa.Table], *, bucket_s: int, target: bytes, serial: str
) -> ShardFile | None:
    """Write tables of a shard's schema, its rows in order, as one durable file; None for none.

    Each becomes a row group and is let go once it is written. `serial` makes the file's name
    unique for ever: two writers of the same records must never share a file, since the one that
    loses the commit removes its own.
    """
    remaining = iter(tables)
    first = next(remaining, None)
    if first is None:
        return None
    name = f"{bucket_s}-{target.hex()[:8]}-{serial}{SUFFIX}"
    metadata = {
        "draftkeep.shard": str(SHARD_FORMAT),
        "draftkeep.bucket_s": str(bucket_s),
        "draftkeep.target": target.hex(),
    }
    with storage.create(name) as stream:
        sink = _Digest(stream)
        rows = _write(sink, first, remaining, SCHEMA.with_metadata(metadata))
    return ShardFile(
        storage=storage,
        name=name,
        bucket_s=bucket_s,
        target=target,
        rows=rows,
        size_bytes=sink.size_bytes,
        sha256=sink.sha256.digest(),
    )


def _write(sink: _Digest, first: pa.Table, remaining: Iterator[pa.Table], schema: pa.Schema) -> int:
    rows = 0
    table: pa.Table | None = first
    with pq.ParquetWriter(sink, schema, **_OPTIONS) as writer:
        while table is not None:
            writer.write_table(table.cast(schema), row_group_size=table.num_rows)
            rows += table.num_rows
            table = next(remaining, None)
    return rows


def _tables(ordered: Sequence[Row]) -> Iterator[pa.Table]:
    written: set[bytes] = set()
    start = size_bytes = 0
    for index, (_, sealed) in enumerate(ordered):
        if index > start and is_full(index - start, size_bytes + len(sealed.ciphertext)):
            yield _table(ordered[start:index], written)
            start, size_bytes = index, 0
        size_bytes += len(sealed.ciphertext)
    if ordered:
        yield _table(ordered[start:], written)


def is_full(rows: int, size_bytes: int) -> bool:
    """Whether a row group of so many rows ends before one that would make it so large."""
    return rows >= shard.ROW_GROUP_ROWS or size_bytes > shard.ROW_GROUP_BYTES


def _table(rows: Sequence[Row], written: set[bytes]) -> pa.Table:
    """Columns of rows. Shares in `written` are in the file already; it grows by those of `rows`."""
    encapsulations = []
    for header, sealed in rows:
        first = header.share_id not in written
        encapsulations.append(sealed.encapsulation if first else None)
        written.add(header.share_id)
    columns = [*zip(*(_header_values(header) for header, _ in rows), strict=True)]
    columns += zip(*(_seal_values(sealed) for _, sealed in rows), strict=True)
    columns.append(tuple(encapsulations))
    arrays = [
        pa.array(values, type=field.type) for values, field in zip(columns, SCHEMA, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)
