"""Every kernel on one device: against a float64 reference, then timed against plain torch.

Shapes: N positions, V vocabulary, K entries of the list, W rows of one verification.
"""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from bench.device.timing import close, median_s
from bench.results import Row
from draftkeep.kernels.coupled import verify_coupled
from draftkeep.kernels.noise import ACCEPT, RECOVERY, gumbel, uniform
from draftkeep.kernels.outcome import Verified
from draftkeep.kernels.processors import log_softmax64
from draftkeep.kernels.rejection import verify_rejection
from draftkeep.kernels.sampling import Sampling
from draftkeep.kernels.sparse_kd import forward_kl
from draftkeep.kernels.topk import argmax, topk_lse

TOP_K = 32


def check_topk(device: torch.device, *, full: bool) -> list[Row]:
    """Top-k with log-sum-exp and argmax against float64, timed against torch's own."""
    shape = (64, 128_256) if full else (8, 49_152)
    logits_NV = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    found = topk_lse(logits_NV, TOP_K)
    exact_NV = logits_NV.double().log_softmax(-1)
    expected_NK = exact_NV.topk(TOP_K, -1).values
    outside_NV = exact_NV.scatter(-1, found.ids_NK, -torch.inf)
    close("log-probabilities", found.logprobs_NK, expected_NK, 1e-5)
    if not torch.equal(argmax(logits_NV)[0], logits_NV.argmax(-1)):
        raise AssertionError("argmax differs from torch's")
    close("tail", found.tail_N, outside_NV.logsumexp(-1), 1e-5)

    def plain() -> None:
        logits_NV.topk(TOP_K, -1)
        logits_NV.logsumexp(-1)

    return _timed(
        "topk_lse",
        lambda: topk_lse(logits_NV, TOP_K),
        plain,
        device,
        against="torch.topk and logsumexp",
    )


def check_forward_kl(device: torch.device, *, full: bool) -> list[Row]:
    """The sparse loss and its gradient against float64 autograd, timed against log_softmax."""
    positions, vocab = (8192, 128_256) if full else (512, 8192)
    generator = torch.Generator().manual_seed(1)
    _check_gradient(device, generator)
    teacher = topk_lse(3 * torch.randn((positions, 4096), generator=generator).to(device), TOP_K)
    logits_NV = torch.randn((positions, vocab), generator=generator).to(device).requires_grad_()

    def ours() -> None:
        loss_N = forward_kl(logits_NV, teacher.ids_NK, teacher.logprobs_NK, teacher.tail_N)
        torch.autograd.grad(loss_N.sum(), logits_NV)

    def plain() -> None:
        loss_NK = -logits_NV.log_softmax(-1).gather(-1, teacher.ids_NK)
        torch.autograd.grad(loss_NK.sum(), logits_NV)

    return _timed("forward_kl", ours, plain, device, against="log_softmax, gather and backward")


def _timed(
    name: str,
    ours: Callable[[], object],
    plain: Callable[[], object],
    device: torch.device,
    *,
    against: str,
) -> list[Row]:
    """What ours takes, and over what plain torch takes."""
    ours_s = median_s(ours, device)
    ratio = ours_s / median_s(plain, device)
    return [
        Row(metric=f"{name}_ms", value=1e3 * ours_s, unit="ms"),
        Row(metric=f"{name}_ratio", value=ratio, unit="ratio", against=against),
    ]


def _check_gradient(device: torch.device, generator: torch.Generator) -> None:
    teacher = topk_lse(3 * torch.randn((32, 512), generator=generator).to(device), TOP_K)
    logits_NV = torch.randn((32, 512), generator=generator).to(device).requires_grad_()
    exact_NV = logits_NV.detach().double().requires_grad_()
    loss_N = forward_kl(logits_NV, teacher.ids_NK, teacher.logprobs_NK, teacher.tail_N)
    (gradient_NV,) = torch.autograd.grad(loss_N.sum(), logits_NV)
    log_q_NV = exact_NV.log_softmax(-1)
    tail_q_N = log_q_NV.scatter(-1, teacher.ids_NK, -torch.inf).logsumexp(-1)
    log_p_NK, log_t_N = teacher.logprobs_NK.double(), teacher.tail_N.double()
    expected_N = (log_p_NK.exp() * (log_p_NK - log_q_NV.gather(-1, teacher.ids_NK))).sum(-1)
    expected_N = expected_N + log_t_N.exp() * (log_t_N - tail_q_N)
    (expected_NV,) = torch.autograd.grad(expected_N.sum(), exact_NV)
    close("loss", loss_N.detach(), expected_N.detach(), 1e-4)
    close("gradient", gradient_NV, expected_NV, 1e-5)


def check_rules(device: torch.device, *, full: bool) -> list[Row]:
    """Both verification rules on this machine's processor: certain cases, then their time.

    They run on the host beside any device: one row of noise and one draw a position. `device` is
    there because every check is called with it.
    """
    vocab, depth = (128_256 if full else 8192), 4
    draw = np.random.default_rng(2)
    logits_WV = draw.normal(scale=3, size=(depth + 1, vocab)).astype(np.float32)
    sampling = Sampling(temperature=1.0)

    def coupled(drafts: list[int]) -> Verified:
        return verify_coupled(
            logits_WV,
            drafts,
            sampling,
            prompt_ids=(1,),
            output_ids=(),
            noise=lambda index: gumbel(7, 0, index, vocab),
        )

    def rejection(drafts: list[int], laws: list[NDArray[np.float64] | None]) -> Verified:
        return verify_rejection(
            logits_WV,
            drafts,
            laws,
            sampling,
            prompt_ids=(1,),
            output_ids=(),
            uniform=lambda index: uniform(7, 0, index, ACCEPT),
            noise=lambda index: gumbel(7, 0, index, vocab, RECOVERY),
        )

    log_p_WV = [log_softmax64(row) for row in logits_WV]
    expected = [
        int((log_p_V + gumbel(7, 0, at, vocab)).argmax()) for at, log_p_V in enumerate(log_p_WV)
    ]
    if list(coupled(expected[:depth]).tokens) != expected:
        raise AssertionError("the coupled rule does not accept its own draws")
    drafts = expected[:depth]
    if rejection(drafts, [*log_p_WV[:depth]]).accepted != depth:
        raise AssertionError("the rejection rule rejects a drafter that equals the target")
    host = torch.device("cpu")
    coupled_s = median_s(lambda: coupled(drafts), host)
    rejection_s = median_s(lambda: rejection(drafts, [*log_p_WV[:depth]]), host)
    noise_s = median_s(lambda: gumbel(7, 0, 0, vocab), host)
    return [
        Row(metric="noise_row_ms", value=1e3 * noise_s, unit="ms"),
        Row(metric="coupled_5_positions_ms", value=1e3 * coupled_s, unit="ms"),
        Row(metric="rejection_5_positions_ms", value=1e3 * rejection_s, unit="ms"),
    ]
