"""Top-k, log-sum-exp and tail mass of rows of logits, with one answer under ties.

N: rows; V: vocabulary; K: entries kept; R: rows to repair; X blocks of Y neighbouring ids; E
entries that are searched.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from draftkeep.errors import ModelError

_BLOCK = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TopKLse:
    """The head of N distributions and the mass outside it.

    ids_NK (int64) is in rank order: value descending, ties by id ascending. logprobs_NK, lse_N
    and tail_N are float32 natural logarithms; tail_N is the mass outside the list, -inf where
    nothing is outside.
    """

    ids_NK: Tensor
    logprobs_NK: Tensor
    lse_N: Tensor
    tail_N: Tensor


def topk_lse(logits_NV: Tensor, k: int) -> TopKLse:
    """The k best log-probabilities of each row, its log-sum-exp and its tail.

    Any float dtype and device; arithmetic is float32. k above V means V. The tail is summed from
    the logits outside the list, relative to the largest of them, so a confident row keeps a tail
    far below the rounding of 1. `logits_NV` is only read. Raises ModelError for NaN or +inf
    logits and for a row of nothing but -inf.
    """
    logits_NV = logits_NV.detach().float()
    vocab = logits_NV.shape[1]
    k = min(k, vocab)
    if k < 1:
        raise ValueError(f"expected k >= 1 and a vocabulary, got k {k} and {vocab} logits")
    # One entry more than asked: it shows a tie at the boundary and is the maximum of the tail.
    values_NK, ids_NK = _largest(logits_NV, min(k + 1, vocab))
    tied_N = (values_NK[:, 1:] == values_NK[:, :-1]).any(dim=1)
    best_out_N = values_NK[:, k] if k < vocab else torch.full_like(values_NK[:, 0], -torch.inf)
    values_NK, ids_NK = values_NK[:, :k], ids_NK[:, :k]
    # Read at once: on a GPU each reading waits for all that came before.
    tied, finite = torch.stack([tied_N, torch.isfinite(values_NK[:, 0])]).tolist()
    if not all(finite):
        raise ModelError(
            "a row of logits has no finite maximum (NaN, +inf or all -inf); the model's weights "
            "or its arithmetic are broken: verify the files or use a wider dtype"
        )
    if any(tied):
        rows_R = tied_N.nonzero_static(size=sum(tied))[:, 0]
        values_NK, ids_NK = values_NK.clone(), ids_NK.clone()
        values_NK[rows_R], ids_NK[rows_R] = _ranked(logits_NV[rows_R], values_NK[rows_R, -1:], k)
    tail_N = _outside(logits_NV, ids_NK, best_out_N)
    lse_N = torch.logaddexp(torch.logsumexp(values_NK, dim=1), tail_N)
    return TopKLse(
        ids_NK=ids_NK,
        logprobs_NK=values_NK - lse_N[:, None],
        lse_N=lse_N,
        tail_N=tail_N - lse_N,
    )


def argmax(logits_NV: Tensor) -> tuple[Tensor, Tensor]:
    """The best id of each row (int64), the lowest of equals, and its logit.

    Several times faster than torch.argmax on a processor. A row with NaN gives NaN as its logit.
    """
    rows, vocab = logits_NV.shape
    blocks = vocab // _BLOCK
    whole = blocks * _BLOCK
    if logits_NV.is_cuda or not whole:
        best_N = logits_NV.argmax(dim=1)
        return best_N, logits_NV.gather(1, best_N[:, None])[:, 0]
    blocks_NXY = logits_NV[:, :whole].view(rows, blocks, _BLOCK)
    block_N = blocks_NXY.amax(dim=2).argmax(dim=1)
    rows_N = torch.arange(rows)
    best_N = block_N * _BLOCK + blocks_NXY[rows_N, block_N].argmax(dim=1)
    values_N = logits_NV[rows_N, best_N]
    if whole < vocab:
        rest_N = whole + logits_NV[:, whole:].argmax(dim=1)
        others_N = logits_NV[rows_N, rest_N]
        later_N = (others_N > values_N) | others_N.isnan()
        best_N = torch.where(later_N, rest_N, best_N)
        values_N = torch.where(later_N, others_N, values_N)
    return best_N, values_N


def _largest(logits_NV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """torch.topk(logits_NV, k, dim=1): the same values; of equal ones at the end other ids.

    On a processor only the k blocks with the largest maxima are searched: together they hold k
    values that no other block exceeds.
    """
    rows, vocab = logits_NV.shape
    blocks = vocab // _BLOCK
    if logits_NV.is_cuda or blocks < 2 * k:
        return torch.topk(logits_NV, k, dim=1)
    whole = blocks * _BLOCK
    blocks_NXY = logits_NV[:, :whole].view(rows, blocks, _BLOCK)
    best_NK = blocks_NXY.amax(dim=2).topk(k, dim=1, sorted=False).indices
    found_NKY = blocks_NXY.gather(1, best_NK[:, :, None].expand(rows, k, _BLOCK))
    found_NE = torch.cat([found_NKY.flatten(1), logits_NV[:, whole:]], dim=1)
    values_NK, at_NK = found_NE.topk(k, dim=1)
    inside_NK = best_NK.gather(1, (at_NK // _BLOCK).clamp_max(k - 1)) * _BLOCK + at_NK % _BLOCK
    outside_NK = at_NK - k * _BLOCK + whole
    return values_NK, torch.where(at_NK < k * _BLOCK, inside_NK, outside_NK)


def _ranked(logits_RV: Tensor, last_R1: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k best of each row by (value descending, id ascending), given each k-th value."""
    above_RV = logits_RV > last_R1
    tied_RV = logits_RV == last_R1
    room_R1 = k - above_RV.sum(dim=1, keepdim=True)
    tied_RV &= tied_RV.cumsum(dim=1, dtype=torch.int32) <= room_R1
    # k a row: the size is known, for which plain nonzero would wait.
    kept_RV = above_RV | tied_RV
    ids_RK = kept_RV.nonzero_static(size=len(kept_RV) * k)[:, 1].view(-1, k)
    values_RK, order_RK = logits_RV.gather(1, ids_RK).sort(dim=1, descending=True, stable=True)
    return values_RK, ids_RK.gather(1, order_RK)


def _outside(logits_NV: Tensor, ids_NK: Tensor, best_N: Tensor) -> Tensor:
    """Log-sum-exp of the logits outside `ids_NK`, whose maximum is `best_N`."""
    base_N = torch.where(torch.isfinite(best_N), best_N, 0.0)
    rest_NV = logits_NV - base_N[:, None]
    rest_NV.scatter_(1, ids_NK, -torch.inf)
    return rest_NV.exp_().sum(dim=1).log_() + base_N
