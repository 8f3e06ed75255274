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

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from draftkeep.errors import ShardError
from draftkeep.ingest.header import Header, header_of
from draftkeep.ingest.record import SealedTrace
from draftkeep.store.storage import Storage
from draftkeep.store.stored_file import is_of_storage

SHARD_FORMAT = 1
# A row group is what readers and merges hold of a shard at a time.
ROW_GROUP_ROWS = 512
ROW_GROUP_BYTES = 4 * 1024**2

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
_EACH_ROWS = ("nonce", "ciphertext", "commitment", "signature")
_NULLABLE = frozenset({"parent_trace_id", "domain", "encapsulation"})


def _schema(types: dict[str, pa.DataType]) -> pa.Schema:
    return pa.schema([pa.field(name, kind, name in _NULLABLE) for name, kind in types.items()])


CLEAR_SCHEMA = _schema(_HEADER_TYPES)
SCHEMA = _schema(_HEADER_TYPES | _SEAL_TYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardFile:
    """A shard that was written. `sha256` is the digest of the whole file."""

    storage: Storage
    name: str
    bucket_s: int
    target: bytes
    rows: int
    size_bytes: int
    sha256: bytes

    def exists(self) -> bool:
        """Whether the file is still there."""
        return self.storage.exists(self.name)

    def remove(self) -> None:
        """Remove the file; for a writer whose transaction did not commit."""
        self.storage.remove([self.name])


def read_shard(
    storage: Storage,
    name: str,
    *,
    tenants: Collection[str] | None = None,
    keep: Callable[[Header], bool] | None = None,
) -> Iterator[SealedTrace]:
    """The records of a shard in its order, header bytes rebuilt bit for bit.

    `tenants` None means all of them; row groups without one of `tenants` are not read.
    `keep` decides by the header. Memory is bounded by one row group and one encapsulation a
    share. Raises FileNotFoundError before the first record, and on an object store also later
    where the file was removed meanwhile; ShardError where its bytes are no shard of a known format,
    StoreError where the storage cannot be used.
    """
    with open_shard(storage, name) as file:
        shares: dict[bytes, bytes] = {}
        for group in _row_groups(file, tenants):
            with decoding(name):
                table = file.read_row_group(group, use_threads=False)
                note_encapsulations(table, shares)
                columns = [_values(column) for column in table.columns[: len(_HEADER_TYPES)]]
                seals = [_values(table.column(name)) for name in _EACH_ROWS]
            for values, seal in zip(
                zip(*columns, strict=True), zip(*seals, strict=True), strict=True
            ):
                header = header_of(values)
                if tenants is not None and header.tenant not in tenants:
                    continue
                if keep is not None and not keep(header):
                    continue
                if header.share_id not in shares:
                    # It lies in a row group that was passed over.
                    _note_all_encapsulations(file, name, header.share_id, shares)
                nonce, ciphertext, commitment, signature = seal
                yield SealedTrace.under(
                    header,
                    nonce=nonce,
                    ciphertext=ciphertext,
                    commitment=commitment,
                    signature=signature,
                    encapsulation=shares[header.share_id],
                )


def _values(column: pa.ChunkedArray) -> list[Any]:
    # By way of NumPy: a column's own list makes a scalar of every value first.
    values: list[Any] = column.to_numpy().tolist()
    return values


def read_keys(storage: Storage, name: str) -> frozenset[tuple[bytes, str]]:
    """Trace id and node of every row. Raises like `read_shard`."""
    with open_shard(storage, name) as file, decoding(name):
        table = file.read(columns=["trace_id", "node"], use_threads=False)
        return frozenset(zip(*(column.to_pylist() for column in table.columns), strict=True))


@contextmanager
def open_shard(storage: Storage, name: str) -> Iterator[pq.ParquetFile]:
    """The open file, known to be a shard of this format. Raises like `read_shard`."""
    with storage.open(name) as source:
        with decoding(name):
            # One request for a row group, and not one for each of its columns.
            file = pq.ParquetFile(source, pre_buffer=True)
        with file:
            found = (file.schema_arrow.metadata or {}).get(b"draftkeep.shard")
            if found != str(SHARD_FORMAT).encode() or file.schema_arrow.names != SCHEMA.names:
                raise ShardError(
                    f"{name} is of shard format {found!r}, expected {SHARD_FORMAT}; "
                    "install the version of draftkeep that wrote it"
                )
            yield file


@contextmanager
def decoding(name: str) -> Iterator[None]:
    """Errors of the shard's bytes as ShardError; those of the storage are left to it."""
    try:
        yield
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if is_of_storage(error):
            raise
        raise ShardError(
            f"{name} is damaged, cut short or no shard ({error!s:.100}); restore it from a copy "
            "whose SHA-256 is the catalog's, or delete its row"
        ) from None


def note_encapsulations(table: pa.Table, shares: dict[bytes, bytes]) -> None:
    """Add the encapsulations that rows of a shard carry to `shares`, by share id."""
    carried = table.select(["share_id", "encapsulation"]).filter(
        pc.is_valid(table.column("encapsulation"))
    )
    shares.update(zip(*(column.to_pylist() for column in carried.columns), strict=True))


def _note_all_encapsulations(
    file: pq.ParquetFile, name: str, wanted: bytes, shares: dict[bytes, bytes]
) -> None:
    with decoding(name):
        table = file.read(columns=["share_id", "encapsulation"], use_threads=False)
        note_encapsulations(table, shares)
    if wanted not in shares:
        raise ShardError(
            f"{name} has a row without its encapsulation; restore it from a copy whose SHA-256 is "
            "the catalog's, or delete its row"
        )


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
