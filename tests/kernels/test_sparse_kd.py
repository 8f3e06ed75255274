"""The sparse loss and its gradient against a plain float64 reference under autograd."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftkeep.kernels.sparse_kd import LOG_FLOOR, forward_kl, restrict
from draftkeep.kernels.topk import topk_lse

_INF = float("inf")


def _reference(logits_NV: Tensor, ids_NK: Tensor, logprobs_NK: Tensor, tail_N: Tensor) -> Tensor:
    """Row by row from the definition, everything in float64 and left to autograd."""
    losses = []
    for logits_V, ids_K, logprobs_K, tail in zip(
        logits_NV.double(), ids_NK, logprobs_NK.double(), tail_N.double(), strict=True
    ):
        inside = [int(token) for token in ids_K if token >= 0]
        outside = [token for token in range(len(logits_V)) if token not in inside]
        weights = torch.cat([logprobs_K[ids_K >= 0], tail[None]]).exp()
        teacher = weights / weights.sum()
        logq_V = logits_V.log_softmax(dim=0)
        logs = logq_V[outside].logsumexp(dim=0) if outside else torch.tensor(-_INF).double()
        student = torch.cat([logq_V[inside], logs[None]])
        terms = [
            p * (p.log() - q.clamp(min=LOG_FLOOR))
            for p, q in zip(teacher, student, strict=True)
            if p > 0
        ]
        losses.append(torch.stack(terms).sum())
    return torch.stack(losses)


def _check(
    logits_NV: Tensor, ids_NK: Tensor, logprobs_NK: Tensor, tail_N: Tensor, tolerance: float
) -> Tensor:
    """Compares loss and gradient under uneven upstream weights; returns the gradient."""
    upstream_N = torch.linspace(0.5, 2.0, len(logits_NV))
    got_NV = logits_NV.clone().requires_grad_()
    loss_N = forward_kl(got_NV, ids_NK, logprobs_NK, tail_N)
    torch.autograd.backward((loss_N * upstream_N).sum())
    want_NV = logits_NV.double().clone().requires_grad_()
    expected_N = _reference(want_NV, ids_NK, logprobs_NK, tail_N)
    torch.autograd.backward((expected_N * upstream_N).sum())
    assert got_NV.grad is not None
    assert want_NV.grad is not None
    torch.testing.assert_close(loss_N.detach().double(), expected_N, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(
        got_NV.grad.double(), want_NV.grad.nan_to_num(0.0), rtol=tolerance, atol=tolerance
    )
    return got_NV.grad


def _teacher(seed: int, rows: int, vocab: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    out = topk_lse(torch.randn(rows, vocab, generator=draw) * 3, k)
    return out.ids_NK, out.logprobs_NK, out.tail_N


@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 4),
    vocab=st.integers(2, 40),
    k=st.integers(1, 12),
    scale=st.sampled_from([0.1, 3.0, 30.0]),
    double=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_equals_autograd(
    seed: int, rows: int, vocab: int, k: int, scale: float, double: bool
) -> None:
    ids, logprobs, tail = _teacher(seed, rows, vocab, k)
    draw = torch.Generator().manual_seed(seed + 1)
    logits = torch.randn(rows, vocab, generator=draw).to(torch.float64 if double else torch.float32)
    _check(logits * scale, ids, logprobs, tail, 1e-12 if double else 2e-5)


@given(seed=st.integers(0, 1000), holes=st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_padding_is_ignored_wherever_it_stands(seed: int, holes: int) -> None:
    ids, logprobs, tail = _teacher(seed, 4, 30, 6)
    draw = torch.Generator().manual_seed(seed)
    for row in range(4):
        gone = torch.randperm(6, generator=draw)[:holes]
        ids[row, gone] = -1
        logprobs[row, gone[::2]] = -_INF
    logits = torch.randn(4, 30, generator=draw, dtype=torch.float64)
    _check(logits, ids, logprobs, tail, 1e-12)


def test_hand_computed() -> None:
    # Teacher 1/2, 1/4 and a tail of 1/4; a uniform student over four ids.
    ids, tail = torch.tensor([[2, 0]]), torch.tensor([math.log(0.25)])
    logprobs = torch.tensor([[0.5, 0.25]]).log()
    logits = torch.zeros(1, 4, requires_grad=True)
    loss = forward_kl(logits, ids, logprobs, tail)
    expected = 0.5 * math.log(0.5 / 0.25) + 0.25 * math.log(0.25 / 0.5)
    assert loss.item() == pytest.approx(expected)
    torch.autograd.backward(loss.sum())
    assert logits.grad is not None
    # q - p on the list, q * (1 - t/s) = 0.25 * (1 - 0.5) off it.
    assert logits.grad[0].tolist() == pytest.approx([0.0, 0.125, -0.25, 0.125])


def test_equal_distributions_cost_nothing() -> None:
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(3))
    out = topk_lse(logits, 8)
    grad = _check(logits, out.ids_NK, out.logprobs_NK, out.tail_N, 2e-6)
    assert grad.abs().max() < 1e-6


def test_loss_is_never_negative_with_rounded_values() -> None:
    ids, logprobs, tail = _teacher(1, 64, 100, 8)
    rounded = (logprobs * 16).round() / 16
    own = torch.zeros(64, 100).scatter(1, ids, rounded + 6)
    assert (forward_kl(own, ids, rounded, tail) >= -1e-6).all()


def test_no_teacher_tail() -> None:
    ids, logprobs, _ = _teacher(2, 3, 20, 4)
    grad = _check(torch.randn(3, 20), ids, logprobs, torch.full((3,), -_INF), 2e-5)
    assert grad.isfinite().all()


def test_one_entry_and_barred_entries() -> None:
    logits = torch.randn(2, 9, dtype=torch.float64)
    _check(logits, torch.tensor([[3], [8]]), torch.zeros(2, 1), torch.full((2,), -_INF), 1e-12)
    ids = torch.tensor([[3, 1], [8, 0]])
    logprobs = torch.tensor([[0.0, -_INF], [-_INF, math.log(0.4)]])
    _check(logits, ids, logprobs, torch.tensor([-_INF, math.log(0.6)]), 1e-12)


def test_nothing_listed_is_one_category() -> None:
    logits = torch.randn(2, 9, requires_grad=True)
    ids = torch.full((2, 3), -1)
    loss = forward_kl(logits, ids, torch.full((2, 3), -_INF), torch.zeros(2))
    torch.autograd.backward(loss.sum())
    assert loss.tolist() == pytest.approx([0.0, 0.0], abs=1e-6)
    assert logits.grad is not None
    assert logits.grad.abs().max() < 1e-6


def test_student_tail_below_the_smallest_float_still_learns() -> None:
    # s is about e^-200: t/s overflows float32, yet the gradient is that of float64.
    logits = torch.zeros(1, 6)
    logits[0, 0] = 200.0
    ids, logprobs = torch.tensor([[0]]), torch.tensor([[math.log(0.75)]])
    grad = _check(logits, ids, logprobs, torch.tensor([math.log(0.25)]), 2e-5)
    assert grad[0, 1:].tolist() == pytest.approx([-0.025] * 5)


@pytest.mark.parametrize("tail", [-_INF, math.log(0.25)])
def test_barred_listed_id_is_floored_without_gradient(tail: float) -> None:
    logits = torch.tensor([[1.0, -_INF, 0.5, 0.0]])
    logprobs = torch.tensor([[0.5, 0.25]]).log()
    got = logits.clone().requires_grad_()
    loss = forward_kl(got, torch.tensor([[0, 1]]), logprobs, torch.tensor([tail]))
    torch.autograd.backward(loss.sum())
    share = 0.25 / (0.75 + math.exp(tail))
    assert loss.item() == pytest.approx(-share * LOG_FLOOR, rel=1e-3)
    assert got.grad is not None
    assert got.grad.isfinite().all()
    assert got.grad[0, 1].item() == 0.0
    assert got.grad.sum().item() == pytest.approx(0.0, abs=1e-6)


def test_nothing_outside_the_list_is_floored_without_gradient() -> None:
    logits = torch.tensor([[1.0, 2.0, -_INF], [0.0, 0.0, 0.0]], requires_grad=True)
    ids = torch.tensor([[0, 1, -1], [0, 1, 2]])
    logprobs = torch.tensor([[0.5, 0.25, 0.0], [0.5, 0.125, 0.125]]).log()
    loss = forward_kl(logits, ids, logprobs, torch.full((2,), math.log(0.25)))
    torch.autograd.backward(loss.sum())
    assert loss.tolist() == pytest.approx([-0.25 * LOG_FLOOR] * 2, rel=1e-3)
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad.sum(dim=1).tolist() == pytest.approx([0.0, 0.0], abs=1e-6)


def test_finite_floor_is_active_in_both_directions() -> None:
    logits = torch.zeros(1, 5, dtype=torch.float64)
    logits[0, 0] = 3.0e4
    ids, logprobs = torch.tensor([[1, 2]]), torch.tensor([[0.5, 0.25]]).double().log()
    _check(logits, ids, logprobs, torch.tensor([math.log(0.25)]), 1e-6)


def test_many_blocks_equal_one() -> None:
    ids, logprobs, tail = _teacher(7, 2100, 257, 5)
    logits = torch.randn(2100, 257, generator=torch.Generator().manual_seed(8))
    whole = logits.clone().requires_grad_()
    torch.autograd.backward(forward_kl(whole, ids, logprobs, tail).sum())
    parts = logits.clone().requires_grad_()
    for rows in torch.arange(2100).view(21, 100):
        part = forward_kl(parts[rows], ids[rows], logprobs[rows], tail[rows])
        torch.autograd.backward(part.sum())
    torch.testing.assert_close(whole.grad, parts.grad, rtol=1e-5, atol=1e-7)


def test_runs_under_bfloat16_autocast() -> None:
    ids, logprobs, tail = _teacher(4, 6, 64, 5)
    hidden = torch.randn(6, 16)
    layer = torch.nn.Linear(16, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = layer(hidden)
        loss = forward_kl(logits, ids, logprobs, tail)
    assert logits.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    torch.testing.assert_close(
        loss.double(), _reference(logits.detach(), ids, logprobs, tail), rtol=1e-5, atol=1e-5
    )
    torch.autograd.backward(loss.mean())
    assert layer.weight.grad is not None
    assert layer.weight.grad.isfinite().all()


def test_no_rows() -> None:
    logits = torch.empty(0, 5, requires_grad=True)
    loss = forward_kl(
        logits, torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2), torch.empty(0)
    )
    torch.autograd.backward(loss.sum())
    assert loss.shape == (0,)


def test_restrict_folds_what_the_drafter_lacks_into_the_tail() -> None:
    lookup = torch.tensor([-1, 1, 0, -1])
    ids = torch.tensor([[2, 0, 1], [3, 0, -1], [1, -1, -1]])
    probabilities = torch.tensor([[0.5, 0.2, 0.1], [0.6, 0.3, 0.0], [0.9, 0.0, 0.0]])
    tail = torch.tensor([0.2, 0.1, 0.1]).log()
    new_ids, logprobs, new_tail = restrict(ids, probabilities.log(), tail, lookup)
    assert new_ids.tolist() == [[0, -1, 1], [-1, -1, -1], [1, -1, -1]]
    expected = torch.tensor([[0.5, 0.0, 0.1], [0.0, 0.0, 0.0], [0.9, 0.0, 0.0]])
    torch.testing.assert_close(logprobs.exp(), expected)
    torch.testing.assert_close(new_tail.exp(), torch.tensor([0.4, 1.0, 0.1]))
    assert tail.exp().tolist() == pytest.approx([0.2, 0.1, 0.1])


@given(seed=st.integers(0, 1000), kept=st.integers(1, 20))
@settings(max_examples=30, deadline=None)
def test_restricted_loss_is_that_of_the_coarser_problem(seed: int, kept: int) -> None:
    ids, logprobs, tail = _teacher(seed, 3, 20, 6)
    own = torch.randperm(20, generator=torch.Generator().manual_seed(seed))[:kept]
    lookup = torch.full((20,), -1).scatter(0, own, torch.arange(kept))
    new = restrict(ids, logprobs, tail, lookup)
    mass = new[1].exp().sum(dim=1) + new[2].exp()
    torch.testing.assert_close(mass, torch.ones(3))
    wide = torch.randn(3, 20, generator=torch.Generator().manual_seed(seed))
    loss = forward_kl(wide[:, own], *new)
    assert loss.isfinite().all() or kept < 6
    assert (loss >= -1e-6).all()


def test_restrict_survives_rows_without_mass() -> None:
    result = restrict(
        torch.tensor([[-1]]), torch.tensor([[-_INF]]), torch.tensor([-_INF]), torch.tensor([0])
    )
    assert [part.tolist() for part in result] == [[[-1]], [[-_INF]], [-_INF]]
    logits = torch.zeros(1, 3, requires_grad=True)
    loss = forward_kl(logits, *result)
    torch.autograd.backward(loss.sum())
    assert loss.tolist() == [0.0]
    assert logits.grad is not None
    assert logits.grad.tolist() == [[0.0, 0.0, 0.0]]
