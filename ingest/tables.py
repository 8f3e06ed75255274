"""Remap tables: token ids renumbered so that frequent ids are small numbers.

A table is a public constant of a target: it comes from the tokenizer's own order (the identity)
or from text the target generated from an EMPTY prompt. It never comes from traffic, because a
table outlives the traces packed with it and would outlive their erasure. Tables are immutable and
named by their digest; a body names the one it was packed with.

Suffix: V ids the table covers. Ids at V and above stand for themselves.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftkeep.errors import CodecError
from draftkeep.files import write_file

DIGEST_BYTES = 32
_CONTEXT = b"draftkeep/v1/remap"
_SUFFIX = ".remap"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemapTable:
    """A permutation of 0..V-1. `digest` is empty for the identity, else 32 bytes.

    rank_of_id_V and id_of_rank_V (int64) are each other's inverse.
    """

    digest: bytes
    rank_of_id_V: NDArray[np.int64]
    id_of_rank_V: NDArray[np.int64]

    @staticmethod
    def identity(vocab: int = 0) -> "RemapTable":
        """The tokenizer's own order. Ids past a table stand for themselves, so 0 covers all."""
        order_V = np.arange(vocab, dtype=np.int64)
        return RemapTable(digest=b"", rank_of_id_V=order_V, id_of_rank_V=order_V)

    @staticmethod
    def from_order(id_of_rank_V: NDArray[np.int64]) -> "RemapTable":
        """A table from ids, most frequent first; CodecError unless it is a permutation."""
        id_of_rank_V = np.ascontiguousarray(id_of_rank_V, dtype=np.int64)
        ranks_V = np.arange(len(id_of_rank_V), dtype=np.int64)
        if not np.array_equal(np.sort(id_of_rank_V), ranks_V):
            raise CodecError(f"remap table of {len(ranks_V)} ids is not a permutation of them")
        rank_of_id_V = np.empty_like(ranks_V)
        rank_of_id_V[id_of_rank_V] = ranks_V
        return RemapTable(
            digest=_digest(_table_bytes(id_of_rank_V)),
            rank_of_id_V=rank_of_id_V,
            id_of_rank_V=id_of_rank_V,
        )

    @staticmethod
    def from_counts(counts_V: NDArray[np.integer]) -> "RemapTable":
        """A table from how often each id occurred; ties go to the lower id."""
        ids_V = np.arange(len(counts_V), dtype=np.int64)
        return RemapTable.from_order(np.lexsort((ids_V, -counts_V.astype(np.int64))))

    def ranks(self, ids_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """Token ids to ranks."""
        return _through(self.rank_of_id_V, ids_N)

    def ids(self, ranks_N: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ranks to token ids."""
        return _through(self.id_of_rank_V, ranks_N)


class TableStore:
    """Remap tables in a directory, one immutable file each, named by digest.

    Callable with a digest, so it serves as the `tables` argument of `decode_body`. Loaded tables
    are kept in memory.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._loaded: dict[bytes, RemapTable] = {b"": RemapTable.identity()}

    def __call__(self, digest: bytes) -> RemapTable:
        """The table of this digest; CodecError where it is missing or damaged."""
        table = self._loaded.get(digest)
        if table is None:
            table = self._loaded[digest] = self._load(digest)
        return table

    def put(self, table: RemapTable) -> Path | None:
        """Store a table durably. Returns its file, or None for the identity, which needs none."""
        if not table.digest:
            return None
        path = self._directory / (table.digest.hex() + _SUFFIX)
        write_file(path, _table_bytes(table.id_of_rank_V))
        return path

    def _load(self, digest: bytes) -> RemapTable:
        path = self._directory / (digest.hex() + _SUFFIX)
        try:
            data = path.read_bytes()
        except OSError:
            raise CodecError(
                f"remap table {digest.hex()[:16]} is not in {self._directory}; copy it from the "
                "node that wrote the trace"
            ) from None
        if len(data) % 4 or _digest(data) != digest:
            raise CodecError(f"remap table {digest.hex()[:16]} is damaged; restore it from a node")
        return RemapTable.from_order(np.frombuffer(data, "<u4").astype(np.int64))


def only_identity(digest: bytes) -> RemapTable:
    """Tables for readers that have none beside the identity."""
    if digest:
        raise CodecError(f"remap table {digest.hex()[:16]} is needed and no table store was given")
    return _IDENTITY


def _table_bytes(id_of_rank_V: NDArray[np.int64]) -> bytes:
    return id_of_rank_V.astype("<u4").tobytes()


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(_CONTEXT + data).digest()


def _through(table_V: NDArray[np.int64], values_N: NDArray[np.int64]) -> NDArray[np.int64]:
    if not len(table_V):
        return values_N
    inside_N = values_N < len(table_V)
    return np.where(inside_N, table_V[np.where(inside_N, values_N, 0)], values_N)


_IDENTITY = RemapTable.identity()
