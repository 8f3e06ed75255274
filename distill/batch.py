"""Traces become tensors: what the drafter reads, and the teacher's distribution for each position.

B: traces of a batch; S: the longest of them in tokens; N: output positions of the batch; K: the
widest stored list; V: the target's vocabulary; C: hidden size; D: the drafter's vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftkeep.ingest.trace import Trace, ValueKind
from draftkeep.kernels.sparse_kd import restrict


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Traces as one rectangle, padded on the right where nothing real can see it.

    Output position n was produced by the hidden state at (rows_N[n], columns_N[n]): that of the
    token before it. Positions come trace by trace, in order.
    """

    ids_BS: Tensor
    rows_N: Tensor
    columns_N: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Inputs and, for the same N positions, the teacher over the drafter's own vocabulary.

    ids_NK are drafter indices, -1 where padded; the mass of ids that the drafter does not have is
    in tail_N. Both are natural logs.
    """

    inputs: Inputs
    ids_NK: Tensor
    logprobs_NK: Tensor
    tail_N: Tensor


def trainable_T(trace: Trace) -> NDArray[np.bool_]:
    """The positions that teach: the target's own distribution is stored, with its tail.

    Without the tail the missing mass is not known, processed values are another distribution, and
    without a prompt no hidden state produced the first position.
    """
    if trace.value_kind is not ValueKind.RAW:
        return np.zeros(trace.positions, dtype=np.bool_)
    return (trace.topk.k_T > 0) & trace.topk.tail_known_T & prompted_T(trace)


def prompted_T(trace: Trace) -> NDArray[np.bool_]:
    """The positions with at least one token before them."""
    return np.arange(trace.positions) + len(trace.prompt_ids_P) > 0


def make_inputs(
    traces: Sequence[Trace], keep: Sequence[NDArray[np.bool_]], *, start: int = 0
) -> Inputs:
    """One rectangle of at least one trace. `keep` picks output positions, all after `start`.

    `start` is the token position, prompt first, from which on the drafter reads.
    """
    tokens = [tokens_of(trace)[start:-1] for trace in traces]
    ids_BS = np.zeros((len(traces), max(len(row) for row in tokens)), dtype=np.int64)
    rows, columns = [], []
    for index, (trace, row) in enumerate(zip(traces, tokens, strict=True)):
        ids_BS[index, : len(row)] = row
        kept_T = np.flatnonzero(keep[index])
        columns.append(kept_T + len(trace.prompt_ids_P) - 1 - start)
        rows.append(np.full(len(kept_T), index))
    return Inputs(
        ids_BS=torch.from_numpy(ids_BS),
        rows_N=torch.from_numpy(np.concatenate(rows)),
        columns_N=torch.from_numpy(np.concatenate(columns)),
    )


def make_batch(traces: Sequence[Trace], lookup_V: Tensor) -> Batch:
    """The batch of these traces' trainable positions for a drafter with this `lookup_V`."""
    keep = [trainable_T(trace) for trace in traces]
    width = max(trace.topk.ids_TK.shape[1] for trace in traces)
    ids = [_widen(trace.topk.ids_TK, width, -1)[k] for trace, k in zip(traces, keep, strict=True)]
    values = [
        _widen(trace.topk.logprobs_TK, width, -np.inf)[k]
        for trace, k in zip(traces, keep, strict=True)
    ]
    tails = [trace.topk.tail_T[k] for trace, k in zip(traces, keep, strict=True)]
    ids_NK, logprobs_NK, tail_N = restrict(
        torch.from_numpy(np.concatenate(ids).astype(np.int64)),
        torch.from_numpy(np.concatenate(values)),
        torch.from_numpy(np.concatenate(tails)),
        lookup_V,
    )
    return Batch(
        inputs=make_inputs(traces, keep), ids_NK=ids_NK, logprobs_NK=logprobs_NK, tail_N=tail_N
    )


def tokens_of(trace: Trace) -> NDArray[np.int32]:
    """Prompt and output as one row of the target's ids."""
    return np.concatenate([trace.prompt_ids_P, trace.output_ids_T])


def hidden_NC(model: Any, inputs: Inputs) -> Tensor:
    """The final hidden states that produce the N positions, in one pass of the drafter's body.

    Padding is only ever on the right, so plain causal attention needs no mask.
    """
    hidden_BSC: Tensor = model.model(input_ids=inputs.ids_BS, use_cache=False).last_hidden_state
    return hidden_BSC[inputs.rows_N, inputs.columns_N]


def _widen(array_TK: NDArray[Any], width: int, fill: float) -> NDArray[Any]:
    missing = width - array_TK.shape[1]
    return np.pad(array_TK, ((0, 0), (0, missing)), constant_values=fill) if missing else array_TK
