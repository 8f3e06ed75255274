"""Shard: one immutable Parquet file of sealed traces with one expiry and one target.

Shard format 1, columns in this order; a row is a trace, rows are sorted by tenant, domain (null
first), created_s, trace_id, node:

    version          uint16                    header version
    trace_id         fixed binary 16
    request_id       fixed binary 16
    tenant           string
    period_id        fixed binary 16
    alias            fixed binary 16
    subject_kind     uint8                     0 anonymous, 1 named
    share_id         fixed binary 16
    target           fixed binary 32           the same in every row
    tokenizer        fixed binary 32
    node             string
    created_s        int64                     Unix seconds
    expiry_s         int64                     Unix seconds
    consent          uint8                     0 tenant, 1 pool, 2 everyone
    policy_version   int64
    origin           uint8                     0 served, 1 relabelled, 2 tap
    parent_trace_id  fixed binary 16, nullable
    domain           string, nullable
    prompt_tokens    int64
    positions        int64
    body_bytes       int64                     length of the plaintext body
    ext              binary
    nonce            fixed binary 12
    ciphertext       binary
    commitment       fixed binary 32
    signature        fixed binary 64
    encapsulation    binary, nullable          set in the first row of each share_id, else null

The columns up to `ext` are the header's fields in encoding order: encoded again they give the
header's bytes bit for bit, which the signature and the seal need. File metadata: `draftkeep.shard`
= format, `draftkeep.bucket_s`, `draftkeep.target` (hex). Ciphertext is stored without compression
or statistics, everything else with zstd. No column but those of the header is readable
without keys.
"""

import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from draftkeep import files
from draftkeep.errors import StoreError
from draftkeep.ingest.header import FIELD_NAMES, Header, decode_header
from draftkeep.ingest.record import SealedTrace

SHARD_FORMAT = 1
TEMPORARY_PREFIX = ".tmp-"
SUFFIX = ".parquet"
ROW_GROUP_ROWS = 512
_READ_ROWS = 64

_HEADER_TYPES = {
    "version": pa.uint16(),
    "trace_id": pa.binary(16),
    "request_id": pa.binary(16),
    "tenant": pa.string(),
    "period_id": pa.binary(16),
    "alias": pa.binary(16),
    "subject_kind": pa.uint8(),
    "share_id": pa.binary(16),
    "target": pa.binary(32),
    "tokenizer": pa.binary(32),
    "node": pa.string(),
    "created_s": pa.int64(),
    "expiry_s": pa.int64(),
    "consent": pa.uint8(),
    "policy_version": pa.int64(),
    "origin": pa.uint8(),
    "parent_trace_id": pa.binary(16),
    "domain": pa.string(),
    "prompt_tokens": pa.int64(),
    "positions": pa.int64(),
    "body_bytes": pa.int64(),
    "ext": pa.binary(),
}
_SEAL_TYPES = {
    "nonce": pa.binary(12),
    "ciphertext": pa.binary(),
    "commitment": pa.binary(32),
    "signature": pa.binary(64),
    "encapsulation": pa.binary(),
}
_NULLABLE = frozenset({"parent_trace_id", "domain", "encapsulation"})


def _schema(types: dict[str, pa.DataType]) -> pa.Schema:
    return pa.schema([pa.field(name, kind, name in _NULLABLE) for name, kind in types.items()])


CLEAR_SCHEMA = _schema(_HEADER_TYPES)
SCHEMA = _schema(_HEADER_TYPES | _SEAL_TYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """A shard on disk. `sha256` is the digest of the whole file."""

    path: Path
    bucket_s: int
    target: bytes
    rows: int
    size_bytes: int
    sha256: bytes


def write_shard(
    directory: Path,
    records: Sequence[SealedTrace],
    *,
    bucket: int,
    target: bytes,
    serial: str,
) -> ShardFile:
    """Write records of one expiry (`bucket`, Unix seconds) and target as one durable file.

    `serial` makes the file's name unique for ever: two writers of the same records must never
    share a file, since the one that loses the commit deletes its own. The file appears under
    its name only when complete; file and directory are synchronised to disk on return. Raises
    StoreError when there are no records, and when one is of another target.
    """
    if not records:
        raise StoreError("a shard of no records was asked for; write at least one")
    table = _table(records, target)
    directory.mkdir(parents=True, exist_ok=True)
    name = f"{bucket}-{target.hex()[:8]}-{serial}{SUFFIX}"
    temporary, path = directory / (TEMPORARY_PREFIX + name), directory / name
    metadata = {
        "draftkeep.shard": str(SHARD_FORMAT),
        "draftkeep.bucket_s": str(bucket),
        "draftkeep.target": target.hex(),
    }
    try:
        digest, size = _write(table.replace_schema_metadata(metadata), temporary)
        temporary.rename(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    files.sync(directory)
    return ShardFile(
        path=path,
        bucket_s=bucket,
        target=target,
        rows=len(records),
        size_bytes=size,
        sha256=digest,
    )


def _table(records: Sequence[SealedTrace], target: bytes) -> pa.Table:
    ordered = sorted(((decode_header(item.header), item) for item in records), key=_sort_key)
    columns: dict[str, list[Any]] = {name: [] for name in SCHEMA.names}
    seen: set[bytes] = set()
    for header, record in ordered:
        if header.target != target:
            raise StoreError(
                f"a record of target {header.target.hex()[:8]} was given for a shard of target "
                f"{target.hex()[:8]}; group records by target"
            )
        for name in FIELD_NAMES:
            columns[name].append(getattr(header, name))
        columns["nonce"].append(record.nonce)
        columns["ciphertext"].append(record.ciphertext)
        columns["commitment"].append(record.commitment)
        columns["signature"].append(record.signature)
        first = header.share_id not in seen
        columns["encapsulation"].append(record.encapsulation if first else None)
        seen.add(header.share_id)
    return pa.table(columns, schema=SCHEMA)


def _sort_key(item: tuple[Header, SealedTrace]) -> tuple[str, str, int, bytes, str]:
    header = item[0]
    return header.tenant, header.domain or "", header.created_s, header.trace_id, header.node


def _write(table: pa.Table, path: Path) -> tuple[bytes, int]:
    sealed = ("nonce", "ciphertext", "commitment", "signature", "encapsulation")
    pq.write_table(
        table,
        path,
        row_group_size=ROW_GROUP_ROWS,
        compression={name: "none" if name in sealed else "zstd" for name in table.column_names},
        use_dictionary=["tenant", "period_id", "share_id", "target", "tokenizer", "node", "domain"],
        write_statistics=["tenant", "created_s", "expiry_s", "domain"],
    )
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").digest()
        return digest, os.fstat(file.fileno()).st_size


def read_shard(
    path: Path,
    *,
    tenants: Collection[str] | None = None,
    keep: Callable[[Header], bool] | None = None,
) -> Iterator[SealedTrace]:
    """The records of a shard in its order, header bytes rebuilt bit for bit.

    `tenants` None means all of them; row groups without one of `tenants` are not read.
    `keep` decides by the header. Memory is bounded by a few rows and one encapsulation a share,
    and the file may be unlinked while it is read. Raises FileNotFoundError before the first
    record, StoreError when the file is not a shard of a known format.
    """
    file = _open(path)
    try:
        groups = _row_groups(file, tenants)
        shares = _encapsulations(file)
        for batch in file.iter_batches(_READ_ROWS, row_groups=groups, use_threads=False):
            for row in batch.to_pylist():
                header = Header(**{name: row[name] for name in FIELD_NAMES})
                if tenants is not None and header.tenant not in tenants:
                    continue
                if keep is None or keep(header):
                    yield _record(header, row, shares)
    finally:
        file.close(force=True)


def read_keys(path: Path) -> frozenset[tuple[bytes, str]]:
    """Trace id and node of every row. Raises like `read_shard`."""
    file = _open(path)
    try:
        table = file.read(columns=["trace_id", "node"], use_threads=False)
    finally:
        file.close(force=True)
    return frozenset(zip(*(column.to_pylist() for column in table.columns), strict=True))


def _record(header: Header, row: dict[str, Any], shares: dict[bytes, bytes]) -> SealedTrace:
    return SealedTrace(
        header=header.encode(),
        nonce=row["nonce"],
        ciphertext=row["ciphertext"],
        commitment=row["commitment"],
        signature=row["signature"],
        encapsulation=shares[header.share_id],
    )


def _open(path: Path) -> pq.ParquetFile:
    try:
        file = pq.ParquetFile(path)
    except pa.ArrowInvalid:
        raise StoreError(
            f"{path.name} is not a Parquet file or is cut short; restore it from a copy whose "
            "SHA-256 is the catalog's, or delete its row"
        ) from None
    found = (file.schema_arrow.metadata or {}).get(b"draftkeep.shard")
    if found != str(SHARD_FORMAT).encode() or file.schema_arrow.names != SCHEMA.names:
        file.close(force=True)
        raise StoreError(
            f"{path.name} is of shard format {found!r}, expected {SHARD_FORMAT}; "
            "install the version of draftkeep that wrote it"
        )
    return file


def _row_groups(file: pq.ParquetFile, tenants: Collection[str] | None) -> list[int]:
    everything = range(file.num_row_groups)
    if tenants is None:
        return list(everything)
    column = SCHEMA.names.index("tenant")
    chosen = []
    for group in everything:
        statistics = file.metadata.row_group(group).column(column).statistics
        if statistics is None or any(
            statistics.min <= tenant <= statistics.max for tenant in tenants
        ):
            chosen.append(group)
    return chosen


def _encapsulations(file: pq.ParquetFile) -> dict[bytes, bytes]:
    shares = {}
    for batch in file.iter_batches(columns=["share_id", "encapsulation"], use_threads=False):
        for row in batch.to_pylist():
            if row["encapsulation"] is not None:
                shares[row["share_id"]] = row["encapsulation"]
    return shares
