"""The body codec, version 1: a trace as compressed bytes, and back.

A body is one version byte, then one zstd frame that states its content size. Log-probabilities
and tails are rounded to the grids of `grids.py`; everything else comes back exactly.
"""

from collections.abc import Callable, Iterable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from draftkeep.errors import CodecError, DraftkeepError
from draftkeep.ingest import grids
from draftkeep.ingest.body_arrays import (
    CORRECTED,
    NOT_LISTED,
    Arrays,
    Ints,
    arrays_of,
    count_of,
    padded,
    read_arrays,
    write_arrays,
)
from draftkeep.ingest.body_fields import Fields, fields_of, read_fields, write_fields
from draftkeep.ingest.frame import compress, decompress
from draftkeep.ingest.stages import each
from draftkeep.ingest.tables import RemapTable
from draftkeep.ingest.trace import Branch, TopK, Trace
from draftkeep.ingest.trace_check import check_branches, check_trace
from draftkeep.ingest.wire import Reader, Writer

CODEC_VERSION = 1
Ids = NDArray[np.int32]


def encode_body(trace: Trace, table: RemapTable) -> bytes:
    """Pack a trace. `table` is a public constant of the target, never made from traffic.

    Raises CodecError where the trace is inconsistent (lengths, ranges, lists not in rank order)
    or larger than a reader accepts. The bytes depend on the zstd library; the payload inside does
    not.
    """
    check_trace(trace)
    writer = Writer()
    write_fields(writer, fields_of(trace, table.digest))
    write_arrays(writer, arrays_of(trace), table)
    return bytes([CODEC_VERSION]) + compress(writer.parts())


def decode_body(data: bytes, tables: Callable[[bytes], RemapTable]) -> Trace:
    """Unpack a body. `tables` gives the remap table of a digest (a `TableStore` does).

    Lists come back as wide as the longest one; a tail that is not known reads as minus infinity.
    Raises CodecError, and nothing else, on bytes that are not a body of a known version.
    """
    return _trace(_with_arrays(tables, _with_fields(_unpacked(data))))


def decode_bodies(
    bodies: Iterable[bytes | DraftkeepError], tables: Callable[[bytes], RemapTable]
) -> list[Trace | DraftkeepError]:
    """`decode_body` of each, in order, or the CodecError that it raises; quicker than one by one.

    What is an error already stays what it is. A few dozen bodies at a time are best.
    """
    errors = (CodecError,)
    readers = each(_unpacked, bodies, errors)
    read = each(_with_fields, readers, errors)
    return each(_trace, each(partial(_with_arrays, tables), read, errors), errors)


def _unpacked(data: bytes) -> Reader:
    if data[:1] != bytes([CODEC_VERSION]):
        raise CodecError(
            f"trace body has codec version {data[:1].hex() or 'none'}, expected 01; "
            "read it with a draftkeep that knows that version"
        )
    return Reader(decompress(data[1:]))


def _with_fields(reader: Reader) -> tuple[Reader, Fields]:
    fields = read_fields(reader)
    check_branches(fields.branches)
    return reader, fields


def _with_arrays(
    tables: Callable[[bytes], RemapTable], read: tuple[Reader, Fields]
) -> tuple[Fields, Arrays]:
    reader, fields = read
    arrays = read_arrays(
        reader,
        tables(fields.table),
        branch_rows=sum(drafts for _, drafts in fields.branches),
        has_processed=fields.has_processed,
    )
    reader.end()
    return fields, arrays


def _trace(laid: tuple[Fields, Arrays]) -> Trace:
    fields, arrays = laid
    positions = len(arrays.how_T)
    if fields.drafters and sum(run.positions for run in fields.drafters) != positions:
        raise CodecError(f"trace body has drafter runs that do not cover {positions} positions")
    prompt_ids_P, ids_N, rest = _split_ids(fields, arrays)
    topk, branch_topks = _topks(fields, arrays, ids_N)
    output_ids_T, rest = _tokens(topk, np.arange(positions), arrays.rank_T, rest)
    rejected_T = np.full(positions, -1, np.int32)
    if len(arrays.rejected_C):
        corrected_C = np.flatnonzero(arrays.how_T == CORRECTED)
        rejected_T[corrected_C], rest = _tokens(topk, corrected_C, arrays.rejected_C, rest)
    drafts = _branch_drafts(fields, rest)
    processed_T = arrays.processed_T
    return Trace(
        prompt_ids_P=prompt_ids_P,
        output_ids_T=output_ids_T,
        topk=topk,
        how_T=arrays.how_T.copy(),
        rejected_T=rejected_T,
        sampling=fields.sampling,
        seed=fields.seed,
        choice=fields.choice,
        finish=fields.finish,
        prompt_cut=fields.prompt_cut,
        output_cut=fields.output_cut,
        held_out=fields.held_out,
        value_kind=fields.value_kind,
        chat_template_hash=fields.chat_template_hash,
        drafters=fields.drafters,
        processed_logprob_T=None
        if processed_T is None
        else grids.from_levels(processed_T, grids.PROCESSED_PER_NAT),
        branches=tuple(
            Branch(start=start, draft_ids_N=ids, topk=branch_topk)
            for (start, _), ids, branch_topk in zip(
                fields.branches, drafts, branch_topks, strict=True
            )
        ),
        ext=fields.ext,
    )


def _branch_drafts(fields: Fields, rest: Ids) -> list[Ids]:
    if not fields.branches:
        return []
    ends = np.cumsum([drafts for _, drafts in fields.branches], dtype=np.int64)
    return np.split(rest, ends[:-1])


def _split_ids(fields: Fields, arrays: Arrays) -> tuple[Ids, Ids, Ids]:
    """The ids of the prompt, those of the lists, and those behind them in the stream."""
    end = arrays.prompt_tokens + len(arrays.levels_N)
    unlisted = count_of(NOT_LISTED, arrays.rank_T) + count_of(NOT_LISTED, arrays.rejected_C)
    expected = end + unlisted + sum(drafts for _, drafts in fields.branches)
    ids_S = arrays.ids_S
    if len(ids_S) != expected:
        raise CodecError(f"trace body has {len(ids_S)} token ids, expected {expected}")
    return ids_S[: arrays.prompt_tokens], ids_S[arrays.prompt_tokens : end], ids_S[end:]


def _topks(fields: Fields, arrays: Arrays, ids_N: Ids) -> tuple[TopK, list[TopK]]:
    """The lists of the output positions, and those of each branch."""
    logprobs_N = grids.from_levels(arrays.levels_N, grids.LEVELS_PER_NAT)
    topks = []
    row, entry = 0, 0
    for rows in (len(arrays.how_T), *(drafts for _, drafts in fields.branches)):
        k_T, codes_T = arrays.k_R[row : row + rows], arrays.tail_R[row : row + rows]
        end = entry + int(k_T.sum())
        width = int(k_T.max(initial=0))
        topks.append(
            TopK(
                ids_TK=padded(ids_N[entry:end], k_T, width, -1),
                logprobs_TK=padded(logprobs_N[entry:end], k_T, width, -np.inf),
                k_T=k_T.astype(np.uint8),
                tail_T=grids.from_tail_codes(codes_T),
                tail_known_T=codes_T != grids.TAIL_UNKNOWN,
            )
        )
        row, entry = row + rows, end
    return topks[0], topks[1:]


def _tokens(topk: TopK, rows_N: NDArray[np.intp], rank_N: Ints, unlisted: Ids) -> tuple[Ids, Ids]:
    """Tokens from ranks in their rows' lists, or from the stream; and the stream behind them."""
    if not len(rank_N):
        return rank_N.astype(np.int32), unlisted
    past_N = rank_N >= topk.k_T[rows_N]
    if not past_N.any():
        return topk.ids_TK[rows_N, rank_N], unlisted
    if (rank_N[past_N] != NOT_LISTED).any():
        raise CodecError("trace body has a token's rank past the end of its list")
    listed_N = ~past_N
    tokens_N = np.empty(len(rank_N), np.int32)
    tokens_N[listed_N] = topk.ids_TK[rows_N[listed_N], rank_N[listed_N]]
    spelled = int(np.count_nonzero(past_N))
    tokens_N[past_N] = unlisted[:spelled]
    return tokens_N, unlisted[spelled:]
