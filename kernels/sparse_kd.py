"""Forward KL against a stored top-k distribution with one bucket for the rest.

The problem has K + 1 categories: the K listed ids and the tail. Nothing of width V is kept
between forward and backward beside the logits themselves.

N: positions; V: the student's vocabulary; K: listed ids; C: rows of one block.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

LOG_FLOOR = -1.0e4
_BLOCK_ELEMENTS_CPU = 1 << 18
_BLOCK_ELEMENTS_GPU = 1 << 26


def forward_kl(logits_NV: Tensor, ids_NK: Tensor, logprobs_NK: Tensor, tail_N: Tensor) -> Tensor:
    """KL(teacher || student) of each position over K + 1 categories, in nats: loss_N.

    The teacher gives ids_NK (int64, -1 is padding and ignored, no id twice in a row), their
    natural log-probabilities and tail_N, the log of its mass elsewhere; any of them may be -inf.
    It is scaled to sum to one, since stored values are rounded. The student's tail is the
    log-sum-exp of its logits outside the list, never one minus a sum.

    With teacher p, t and student q, s the gradient is q_j - p_j on the list and
    q_j - t * q_j / s elsewhere, where q_j / s is taken as a softmax over the outside, so it is
    bounded by 1 however small s is. A student log-probability below LOG_FLOOR (its logit is -inf,
    or nothing is outside the list) counts as LOG_FLOOR and has no gradient.

    Arithmetic is float64 for float64 logits, else float32; the gradient has the logits' dtype.
    Only the logits get one, and only once (no second derivative). Runs on any device.
    """
    loss_N: Tensor = _ForwardKl.apply(logits_NV, ids_NK, logprobs_NK, tail_N)
    return loss_N


def restrict(
    ids_NK: Tensor, logprobs_NK: Tensor, tail_N: Tensor, lookup_V: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """A teacher over the target's ids becomes one over a drafter's own, smaller vocabulary.

    lookup_V (int64) gives the drafter's index of a target id, or -1. Entries without one become
    padding (-1, -inf) and their mass goes to the tail; so does the mass of entries that were
    padding already. Total mass is kept. Inputs are only read.
    """
    mapped_NK = torch.where(ids_NK >= 0, lookup_V[ids_NK.clamp(min=0)], -1)
    gone_NK = mapped_NK < 0
    lost_NK = logprobs_NK.masked_fill(~gone_NK, -torch.inf)
    tail_N = torch.logsumexp(torch.cat([lost_NK, tail_N[:, None]], dim=1), dim=1)
    return mapped_NK, logprobs_NK.masked_fill(gone_NK, -torch.inf), tail_N


class _ForwardKl(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, ids_NK: Tensor, logprobs_NK: Tensor, tail_N: Tensor
    ) -> Tensor:
        dtype = torch.float64 if logits_NV.dtype == torch.float64 else torch.float32
        logp_NK, logt_N = _teacher(ids_NK, logprobs_NK.to(dtype), tail_N.to(dtype))
        out_N = _outside(logits_NV, ids_NK, dtype)
        z_NK = logits_NV.gather(1, ids_NK.clamp(min=0)).to(dtype)
        z_NK.masked_fill_(ids_NK < 0, -torch.inf)
        lse_N = torch.logaddexp(torch.logsumexp(z_NK, dim=1), out_N)
        logq_NK, logs_N = z_NK - lse_N[:, None], out_N - lse_N
        ctx.save_for_backward(logits_NV, ids_NK, logp_NK, logt_N, logq_NK, logs_N, out_N)
        return _kl(logp_NK, logq_NK).sum(dim=1) + _kl(logt_N, logs_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream_N: Tensor) -> tuple[Tensor, None, None, None]:
        logits_NV, ids_NK, logp_NK, logt_N, logq_NK, logs_N, out_N = ctx.saved_tensors
        # A floored term is a constant: its teacher mass drops out of the gradient.
        p_NK = logp_NK.exp().masked_fill_(logq_NK < LOG_FLOOR, 0.0)
        t_N = logt_N.exp().masked_fill_(logs_N < LOG_FLOOR, 0.0)
        live_N = p_NK.sum(dim=1) + t_N
        on_NK = (logq_NK.exp() * live_N[:, None] - p_NK) * upstream_N[:, None]
        off_N = (logs_N.exp() * live_N - t_N) * upstream_N
        return _gradient(logits_NV, ids_NK, out_N, on_NK, off_N), None, None, None


def _teacher(ids_NK: Tensor, logp_NK: Tensor, logt_N: Tensor) -> tuple[Tensor, Tensor]:
    """The teacher without padding, scaled to sum to one."""
    logp_NK = logp_NK.masked_fill(ids_NK < 0, -torch.inf)
    mass_N = torch.logaddexp(torch.logsumexp(logp_NK, dim=1), logt_N)
    # A row without any mass stays so and costs nothing.
    mass_N = torch.where(torch.isfinite(mass_N), mass_N, 0.0)
    return logp_NK - mass_N[:, None], logt_N - mass_N


def _kl(logp: Tensor, logq: Tensor) -> Tensor:
    """p * (log p - log q), 0 where p is 0."""
    term = logp.exp() * (logp - logq.clamp(min=LOG_FLOOR))
    return term.masked_fill(logp == -torch.inf, 0.0)


def _blocks(logits_NV: Tensor, dtype: torch.dtype) -> tuple[Tensor, int]:
    """A scratch block of rows, one column wider than V, and its height.

    Blocks fit the processor's cache, so that several passes cost little more than one. Padding
    ids write to the extra column.
    """
    limit = _BLOCK_ELEMENTS_CPU if logits_NV.device.type == "cpu" else _BLOCK_ELEMENTS_GPU
    rows, vocab = logits_NV.shape
    height = max(1, min(rows, limit // max(vocab, 1)))
    return torch.empty(height, vocab + 1, dtype=dtype, device=logits_NV.device), height


def _outside(logits_NV: Tensor, ids_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """Log-sum-exp of the logits outside each list, -inf where there are none."""
    rows, vocab = logits_NV.shape
    out_N = torch.empty(rows, dtype=dtype, device=logits_NV.device)
    scratch, height = _blocks(logits_NV, dtype)
    for at in range(0, rows, height):
        here = slice(at, min(at + height, rows))
        block_CV = scratch[: here.stop - at]
        block_CV[:, :vocab] = logits_NV[here]
        block_CV[:, vocab] = -torch.inf
        block_CV.scatter_(1, ids_NK[here].where(ids_NK[here] >= 0, vocab), -torch.inf)
        best_C1 = block_CV.amax(dim=1, keepdim=True)
        best_C1.masked_fill_(best_C1 == -torch.inf, 0.0)
        total_C = block_CV.sub_(best_C1).exp_().sum(dim=1)
        out_N[here] = total_C.log_() + best_C1[:, 0]
    return out_N


def _gradient(
    logits_NV: Tensor, ids_NK: Tensor, out_N: Tensor, on_NK: Tensor, off_N: Tensor
) -> Tensor:
    """on_NK at the listed ids, off_N * exp(logit - out_N) everywhere else."""
    rows, vocab = logits_NV.shape
    grad_NV = torch.empty_like(logits_NV)
    base_N1 = torch.where(torch.isfinite(out_N), out_N, 0.0)[:, None]
    scratch, height = _blocks(logits_NV, on_NK.dtype)
    for at in range(0, rows, height):
        here = slice(at, min(at + height, rows))
        block_CV = scratch[: here.stop - at]
        torch.sub(logits_NV[here], base_N1[here], out=block_CV[:, :vocab])
        block_CV.exp_().mul_(off_N[here, None])
        block_CV.scatter_(1, ids_NK[here].where(ids_NK[here] >= 0, vocab), on_NK[here])
        grad_NV[here] = block_CV[:, :vocab]
    return grad_NV
