"""The arrays of a trace body: token ids, lists of the head, and what happened at each position.

All rows of a trace lie behind one another: the output positions, then those of each rejected
branch. All its token ids form one stream, and the stream is stored as indices into the sorted
distinct ids of the trace: most ids repeat, so an index takes 11 bits where an id takes 16.

Suffixes: P prompt tokens, T output tokens, R rows, K widest list, N entries of all lists, D
distinct ids, S the id stream, C corrected positions, E tokens that are in no list.
"""

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from draftkeep.errors import CodecError
from draftkeep.ingest import grids
from draftkeep.ingest.tables import RemapTable
from draftkeep.ingest.trace import How, TopK, Trace
from draftkeep.ingest.trace_check import MAX_CELLS, MAX_ROWS
from draftkeep.ingest.wire import Reader, Writer

NOT_LISTED = 255
_MAX_ID = 2**31 - 1
_MAX_BYTE = 255
# As plain numbers: comparing an array with a member of an enumeration takes as long as with a
# thousand numbers.
CORRECTED = int(How.CORRECTED)
_LAST_HOW = int(max(How))

Ints = NDArray[np.integer]
Bytes = NDArray[np.uint8]
_Value = TypeVar("_Value", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """The arrays as they are stored, before planes and compression.

    ids_S: prompt, lists, unlisted outputs, unlisted rejected drafts, branch drafts, in this order.
    levels_N holds grid levels in list order. rank_T and rejected_C are ranks in the position's
    own list, or 255. Levels that were read are of whatever integer type was at hand, and may be
    above the grid's last.
    """

    prompt_tokens: int
    k_R: NDArray[np.int64]
    ids_S: NDArray[np.int32]
    levels_N: Ints
    tail_R: Bytes
    how_T: Bytes
    rank_T: Bytes
    rejected_C: Bytes
    processed_T: Ints | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lengths:
    """How long the list of each row is, and of all rows what would take a pass to find."""

    k_R: NDArray[np.int64]
    entries: int
    shortest: int
    longest: int


def arrays_of(trace: Trace) -> Arrays:
    """Lay a valid trace out; CodecError where a value does not fit."""
    topks = [trace.topk, *(branch.topk for branch in trace.branches)]
    entries = [_entries(topk) for topk in topks]
    corrected_T = trace.how_T == CORRECTED
    rank_T, unlisted = _ranks(trace.topk, trace.output_ids_T)
    rejected_C, unlisted_rejected = _ranks(
        _rows(trace.topk, corrected_T), trace.rejected_T[corrected_T]
    )
    processed_T = trace.processed_logprob_T
    return Arrays(
        prompt_tokens=len(trace.prompt_ids_P),
        k_R=np.concatenate([topk.k_T for topk in topks], dtype=np.int64),
        ids_S=np.concatenate(
            [
                trace.prompt_ids_P,
                *(topk.ids_TK[mask_TK] for topk, mask_TK in zip(topks, entries, strict=True)),
                unlisted,
                unlisted_rejected,
                *(branch.draft_ids_N for branch in trace.branches),
            ]
        ),
        levels_N=np.concatenate(
            [
                grids.to_levels(topk.logprobs_TK[mask_TK], grids.LEVELS_PER_NAT)
                for topk, mask_TK in zip(topks, entries, strict=True)
            ]
        ),
        tail_R=np.concatenate(
            [grids.to_tail_codes(topk.tail_T, topk.tail_known_T) for topk in topks]
        ),
        how_T=trace.how_T,
        rank_T=rank_T,
        rejected_C=rejected_C,
        processed_T=None
        if processed_T is None
        else grids.to_levels(processed_T, grids.PROCESSED_PER_NAT),
    )


def write_arrays(writer: Writer, arrays: Arrays, table: RemapTable) -> None:
    """Write the arrays; CodecError where an id is negative or a list is not in rank order."""
    if len(arrays.ids_S) and arrays.ids_S.min() < 0:
        raise CodecError("a token id of the trace is negative; check the emitter")
    writer.varint(arrays.prompt_tokens)
    writer.varint(len(arrays.how_T))
    _write_runs(writer, arrays.k_R)
    ranks_D, index_S = np.unique(
        table.ranks(arrays.ids_S.astype(np.int64, copy=False)), return_inverse=True
    )
    writer.array(np.diff(ranks_D, prepend=0))
    writer.array(index_S)
    heads_R, gaps_G = _gaps(arrays.k_R, arrays.levels_N)
    writer.array(gaps_G)
    writer.array(heads_R)
    writer.array(arrays.tail_R)
    writer.array(arrays.rank_T)
    writer.array(arrays.how_T)
    writer.array(arrays.rejected_C)
    if arrays.processed_T is not None:
        writer.array(arrays.processed_T)


def read_arrays(
    reader: Reader, table: RemapTable, *, branch_rows: int, has_processed: bool
) -> Arrays:
    """Read what `write_arrays` wrote; CodecError on anything else."""
    prompt_tokens, positions = reader.varint(), reader.varint()
    if positions + branch_rows > MAX_ROWS:
        raise CodecError(f"trace body promises more than {MAX_ROWS} positions; drop the trace")
    lengths = _read_runs(reader, positions + branch_rows)
    ids_S = _read_ids(reader, table)
    levels_N = _levels(lengths, gaps_G=reader.array(), heads_R=reader.array())
    tail_R = _bytes("tail", grids.TAIL_UNKNOWN, reader.array(positions + branch_rows))
    rank_T = _bytes("rank", NOT_LISTED, reader.array(positions))
    how_T = _bytes("kind of position", _LAST_HOW, reader.array(positions))
    return Arrays(
        prompt_tokens=prompt_tokens,
        k_R=lengths.k_R,
        ids_S=ids_S,
        levels_N=levels_N,
        tail_R=tail_R,
        how_T=how_T,
        rank_T=rank_T,
        rejected_C=_bytes("rank", NOT_LISTED, reader.array(count_of(CORRECTED, how_T))),
        processed_T=reader.array(positions) if has_processed else None,
    )


def _read_ids(reader: Reader, table: RemapTable) -> NDArray[np.int32]:
    """The id stream: the distinct ids behind their indices."""
    ranks_D = np.add.accumulate(reader.array(), dtype=np.int64)
    if len(ranks_D) and ranks_D[-1] > _MAX_ID:
        raise CodecError("trace body holds a token id past 31 bits; drop the trace")
    ids_D = table.ids(ranks_D).astype(np.int32)
    try:
        return ids_D.take(reader.array())
    except IndexError:
        raise CodecError(
            "trace body refers to a token id it does not list; drop the trace"
        ) from None


def count_of(value: int, bytes_N: Bytes) -> int:
    """How often a byte occurs; a short array is counted faster so than by NumPy."""
    return bytes_N.tobytes().count(value)


def _bytes(name: str, bound: int, values_N: Ints) -> Bytes:
    """Values of one byte each, of whatever width they were stored."""
    if bound == _MAX_BYTE and values_N.itemsize == 1:
        return values_N.view(np.uint8)
    if values_N.max(initial=0) > bound:
        raise CodecError(f"trace body has a {name} above {bound}; drop the trace")
    return values_N.astype(np.uint8)


def _entries(topk: TopK) -> NDArray[np.bool_]:
    return np.arange(topk.ids_TK.shape[1]) < topk.k_T[:, None]


def _rows(topk: TopK, chosen_T: NDArray[np.bool_]) -> TopK:
    return TopK(
        ids_TK=topk.ids_TK[chosen_T],
        logprobs_TK=topk.logprobs_TK[chosen_T],
        k_T=topk.k_T[chosen_T],
        tail_T=topk.tail_T[chosen_T],
        tail_known_T=topk.tail_known_T[chosen_T],
    )


def _ranks(topk: TopK, tokens_T: NDArray[np.int32]) -> tuple[Bytes, NDArray[np.int32]]:
    """The rank of each token in its row's list, or 255, and the tokens that got 255."""
    match_TK = (topk.ids_TK == tokens_T[:, None]) & _entries(topk)
    listed_T = match_TK.any(axis=1)
    rank_T = np.full(len(tokens_T), NOT_LISTED, np.uint8)
    if match_TK.shape[1]:
        rank_T[listed_T] = match_TK.argmax(axis=1)[listed_T]
    return rank_T, tokens_T[~listed_T]


def _write_runs(writer: Writer, k_R: Ints) -> None:
    starts = np.flatnonzero(np.diff(k_R, prepend=-1))
    lengths = np.diff(starts, append=len(k_R))
    writer.varint(len(starts))
    for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
        writer.varint(length)
        writer.u8(int(k_R[start]))


def _read_runs(reader: Reader, rows: int) -> _Lengths:
    runs = [(reader.varint(), reader.u8()) for _ in range(reader.count(2))]
    if sum([length for length, _ in runs]) != rows:
        raise CodecError(f"trace body has list lengths that do not cover its {rows} positions")
    widths = [width for length, width in runs if length]
    longest = max(widths, default=0)
    if rows * longest > MAX_CELLS:
        raise CodecError(f"trace body unpacks to more than {MAX_CELLS} entries; drop the trace")
    return _Lengths(
        k_R=np.array(widths, np.int64).repeat([length for length, _ in runs if length]),
        entries=sum([length * width for length, width in runs]),
        shortest=min(widths, default=0),
        longest=longest,
    )


def _gaps(k_R: Ints, levels_N: Ints) -> tuple[Ints, Ints]:
    """First level of each list that is not empty, and the steps to the next ones."""
    first_N = _first(k_R)
    steps_N = np.diff(levels_N, prepend=0)
    gaps_G = steps_N[~first_N]
    if len(gaps_G) and gaps_G.min() < 0:
        raise CodecError("a list of the trace is not in rank order; sort it by falling value")
    return levels_N[first_N], gaps_G


def _levels(lengths: _Lengths, *, gaps_G: Ints, heads_R: Ints) -> Ints:
    filled = lengths.k_R if lengths.shortest else lengths.k_R[lengths.k_R > 0]
    if len(heads_R) != len(filled) or len(heads_R) + len(gaps_G) != lengths.entries:
        raise CodecError("trace body has values that do not match its list lengths")
    if not lengths.entries:
        return gaps_G
    width = lengths.longest
    levels_RK = np.empty((len(filled), width), np.int64)
    levels_RK[:, 0] = heads_R
    levels_RK[:, 1:] = padded(gaps_G, filled - 1, width - 1, 0)
    np.add.accumulate(levels_RK, axis=1, out=levels_RK)
    if levels_RK.size == lengths.entries:
        return levels_RK.reshape(-1)
    return levels_RK[np.arange(width) < filled[:, None]]


def padded(values_N: NDArray[_Value], k_R: Ints, width: int, filler: float) -> NDArray[_Value]:
    """Lists of k_R values each, one behind the other, as rows filled up to `width`."""
    if len(values_N) == len(k_R) * width:
        return values_N.reshape(len(k_R), width)
    rows_RK = np.full((len(k_R), width), filler, values_N.dtype)
    rows_RK[np.arange(width) < k_R[:, None]] = values_N
    return rows_RK


def _first(k_R: Ints) -> NDArray[np.bool_]:
    filled = k_R[k_R > 0]
    first_N = np.zeros(int(filled.sum()), np.bool_)
    first_N[np.cumsum(filled) - filled] = True
    return first_N
