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
from draftkeep.ingest.trace import MAX_K, How, TopK, Trace
from draftkeep.ingest.trace_check import MAX_CELLS, MAX_ROWS
from draftkeep.ingest.wire import Reader, Writer

NOT_LISTED = 255
_MAX_ID = 2**31 - 1
# As plain numbers: comparing an array with a member of an enumeration takes as long as with a
# thousand numbers.
CORRECTED = int(How.CORRECTED)
_LAST_HOW = int(max(How))

Ints = NDArray[np.integer]
_Value = TypeVar("_Value", bound=np.generic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrays:
    """The arrays as they are stored, before planes and compression.

    ids_S: prompt, lists, unlisted outputs, unlisted rejected drafts, branch drafts, in this order.
    levels_N holds grid levels in list order. rank_T and rejected_C are ranks in the position's
    own list, or 255. What is read is of whatever integer type was at hand, levels and k_R int64
    and ids_S int32; calculate with no other before it is cast.
    """

    prompt_tokens: int
    k_R: Ints
    ids_S: Ints
    levels_N: Ints
    tail_R: Ints
    how_T: Ints
    rank_T: Ints
    rejected_C: Ints
    processed_T: Ints | None


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
        k_R=_join([topk.k_T for topk in topks]),
        ids_S=_join(
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
        tail_R=_join([grids.to_tail_codes(topk.tail_T, topk.tail_known_T) for topk in topks]),
        how_T=_join([trace.how_T]),
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
    k_R = _read_runs(reader, positions + branch_rows)
    ranks_D = reader.array().astype(np.int64)
    np.add.accumulate(ranks_D, out=ranks_D)
    if len(ranks_D) and ranks_D[-1] > _MAX_ID:
        raise CodecError("trace body holds a token id past 31 bits; drop the trace")
    index_S = reader.array()
    if len(index_S) and index_S.max() >= len(ranks_D):
        raise CodecError("trace body refers to a token id it does not list; drop the trace")
    levels_N = _levels(k_R, gaps_G=reader.array(), heads_R=reader.array())
    tail_R = reader.array(positions + branch_rows)
    rank_T, how_T = reader.array(positions), reader.array(positions)
    rejected_C = reader.array(int(np.count_nonzero(how_T == CORRECTED)))
    processed_T = reader.array(positions) if has_processed else None
    _check_bound("level", grids.NO_MASS_LEVEL, levels_N)
    _check_bound("tail", grids.TAIL_UNKNOWN, tail_R)
    _check_bound("rank", NOT_LISTED, rank_T)
    _check_bound("rank", NOT_LISTED, rejected_C)
    _check_bound("kind of position", _LAST_HOW, how_T)
    if processed_T is not None:
        _check_bound("level", grids.NO_MASS_LEVEL, processed_T)
    return Arrays(
        prompt_tokens=prompt_tokens,
        k_R=k_R,
        # An index is taken fastest by the type that numpy itself counts in.
        ids_S=table.ids(ranks_D).astype(np.int32)[index_S.astype(np.intp)],
        levels_N=levels_N,
        tail_R=tail_R,
        how_T=how_T,
        rank_T=rank_T,
        rejected_C=rejected_C,
        processed_T=processed_T,
    )


def _check_bound(name: str, bound: int, values_N: Ints) -> None:
    if bound >= 255 and values_N.dtype == np.uint8:
        return
    if len(values_N) and values_N.max() > bound:
        raise CodecError(f"trace body has a {name} above {bound}; drop the trace")


def _join(pieces: list[NDArray[np.generic]]) -> Ints:
    return np.concatenate(pieces).astype(np.int64)


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


def _ranks(topk: TopK, tokens_T: NDArray[np.int32]) -> tuple[Ints, NDArray[np.int32]]:
    """The rank of each token in its row's list, or 255, and the tokens that got 255."""
    match_TK = (topk.ids_TK == tokens_T[:, None]) & _entries(topk)
    listed_T = match_TK.any(axis=1)
    rank_T = np.full(len(tokens_T), NOT_LISTED, np.int64)
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


def _read_runs(reader: Reader, rows: int) -> Ints:
    lengths: list[int] = []
    widths: list[int] = []
    for _ in range(reader.count(2)):
        lengths.append(reader.varint())
        widths.append(reader.u8())
    if sum(lengths) != rows:
        raise CodecError(f"trace body has list lengths that do not cover its {rows} positions")
    widest = max(widths, default=0)
    if rows * widest > MAX_CELLS or widest > MAX_K:
        raise CodecError(f"trace body unpacks to more than {MAX_CELLS} entries; drop the trace")
    return np.repeat(np.array(widths, np.int64), lengths)


def _gaps(k_R: Ints, levels_N: Ints) -> tuple[Ints, Ints]:
    """First level of each list that is not empty, and the steps to the next ones."""
    first_N = _first(k_R)
    steps_N = np.diff(levels_N, prepend=0)
    gaps_G = steps_N[~first_N]
    if len(gaps_G) and gaps_G.min() < 0:
        raise CodecError("a list of the trace is not in rank order; sort it by falling value")
    return levels_N[first_N], gaps_G


def _levels(k_R: Ints, *, gaps_G: Ints, heads_R: Ints) -> Ints:
    filled = k_R if k_R.all() else k_R[k_R > 0]
    if len(heads_R) != len(filled) or len(heads_R) + len(gaps_G) != int(filled.sum()):
        raise CodecError("trace body has values that do not match its list lengths")
    gaps_RG = padded(gaps_G, filled - 1, 0)
    levels_RK = np.empty((len(filled), 1 + gaps_RG.shape[1]), np.int64)
    levels_RK[:, 0] = heads_R
    levels_RK[:, 1:] = gaps_RG
    np.add.accumulate(levels_RK, axis=1, out=levels_RK)
    return unpadded(levels_RK, filled)


def padded(values_N: NDArray[_Value], k_R: Ints, filler: float) -> NDArray[_Value]:
    """Lists of k_R values each, one behind the other, as rows filled up to the longest."""
    width = int(k_R.max(initial=0))
    if len(values_N) == len(k_R) * width:
        return values_N.reshape(len(k_R), width)
    rows_RK = np.full((len(k_R), width), filler, values_N.dtype)
    rows_RK[np.arange(width) < k_R[:, None]] = values_N
    return rows_RK


def unpadded(rows_RK: NDArray[_Value], k_R: Ints) -> NDArray[_Value]:
    """The first k_R values of each row, one behind the other."""
    if rows_RK.size == int(k_R.sum()):
        return rows_RK.reshape(-1)
    return rows_RK[np.arange(rows_RK.shape[1]) < k_R[:, None]]


def _first(k_R: Ints) -> NDArray[np.bool_]:
    filled = k_R[k_R > 0]
    first_N = np.zeros(int(filled.sum()), np.bool_)
    first_N[np.cumsum(filled) - filled] = True
    return first_N
