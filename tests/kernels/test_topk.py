"""Top-k, log-sum-exp and tail: exact order under ties, exact tails of confident rows."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from draftkeep.errors import ModelError
from draftkeep.kernels.topk import argmax, topk_lse


def _ranked(row: Tensor, k: int) -> list[int]:
    values = row.float().tolist()
    return sorted(range(len(values)), key=lambda token: (-values[token], token))[:k]


@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 5),
    vocab=st.integers(1, 77),
    k=st.integers(1, 80),
    levels=st.sampled_from([1, 3, 20, 10_000]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
)
@settings(max_examples=200, deadline=None)
def test_order_mass_and_lse(
    seed: int, rows: int, vocab: int, k: int, levels: int, dtype: torch.dtype
) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = (torch.randint(0, levels, (rows, vocab), generator=draw) / levels * 8).to(dtype)
    logits[:, vocab // 2 + 1 :: 5] = -torch.inf
    before = logits.clone()
    out = topk_lse(logits, k)
    assert torch.equal(logits, before)
    assert out.ids_NK.tolist() == [_ranked(row, k) for row in logits]
    exact = logits.double().log_softmax(dim=1)
    torch.testing.assert_close(
        out.logprobs_NK.double(), exact.gather(1, out.ids_NK), rtol=1e-6, atol=2e-6
    )
    outside = exact.scatter(1, out.ids_NK, -torch.inf).logsumexp(dim=1)
    torch.testing.assert_close(out.tail_N.double(), outside, rtol=1e-6, atol=2e-6)
    torch.testing.assert_close(
        out.lse_N.double(), logits.double().logsumexp(dim=1), rtol=1e-6, atol=2e-6
    )
    assert out.ids_NK.dtype == torch.int64
    assert {out.logprobs_NK.dtype, out.lse_N.dtype, out.tail_N.dtype} == {torch.float32}


def test_confident_row_keeps_its_tail() -> None:
    # A tail of about 1.9e-8, below half the spacing of float32 at 1, where 1 - sum gives 6e-8 or 0.
    logits = torch.full((1, 1000), -10.0)
    logits[0, 7] = 14.7
    logits[0, 8:11] = 5.0
    out = topk_lse(logits, 4)
    exact = logits.double().log_softmax(dim=1).scatter(1, out.ids_NK, -torch.inf).logsumexp(dim=1)
    assert 1.8e-8 < exact.exp().item() < 2.0e-8
    assert out.tail_N.double().exp().item() == pytest.approx(exact.exp().item(), rel=1e-5)


def test_tail_below_the_smallest_float_is_not_none() -> None:
    logits = torch.tensor([[300.0, 0.0, 0.0]])
    out = topk_lse(logits, 1)
    assert out.tail_N.item() == pytest.approx(-300.0 + 0.6931472)


def test_whole_vocabulary_has_no_tail() -> None:
    for k in (3, 50):
        out = topk_lse(torch.tensor([[0.0, 1.0, 2.0]]), k)
        assert out.ids_NK.tolist() == [[2, 1, 0]]
        assert out.tail_N.tolist() == [-float("inf")]


def test_padding_of_the_vocabulary_is_no_tail() -> None:
    out = topk_lse(torch.tensor([[1.0, -torch.inf, 0.0, -torch.inf]]), 3)
    assert out.ids_NK.tolist() == [[0, 2, 1]]
    assert out.logprobs_NK[0, 2].item() == -float("inf")
    assert out.tail_N.item() == -float("inf")


def test_wide_bfloat16_rows_with_ties() -> None:
    logits = (torch.randn(16, 8191, generator=torch.Generator().manual_seed(1)) * 3).bfloat16()
    out = topk_lse(logits, 32)
    assert out.ids_NK.tolist() == [_ranked(row, 32) for row in logits]


@given(
    seed=st.integers(0, 10_000),
    rows=st.integers(1, 4),
    vocab=st.sampled_from([640, 641, 1000, 1023]),
    k=st.sampled_from([1, 3, 4]),
    levels=st.sampled_from([2, 30, 400, 100_000]),
)
@settings(max_examples=100, deadline=None)
def test_many_blocks_hide_no_entry(seed: int, rows: int, vocab: int, k: int, levels: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, levels, (rows, vocab), generator=draw).float() / 7
    logits[0, vocab - seed % 90 - 1] = levels
    out = topk_lse(logits[:, :], k)
    assert out.ids_NK.tolist() == [_ranked(row, k) for row in logits]
    best, values = argmax(logits)
    assert best.tolist() == [_ranked(row, 1)[0] for row in logits]
    assert torch.equal(values, logits.amax(dim=1))


@pytest.mark.parametrize("vocab", [5, 64, 200])
def test_the_best_of_a_row_with_nan_is_nan(vocab: int) -> None:
    logits = torch.zeros(2, vocab)
    logits[1, vocab - 1] = torch.nan
    best, values = argmax(logits)
    assert best[0] == 0
    assert values[0] == 0
    assert values[1].isnan()


class _Asked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes every operation whose answer a GPU would be waited for."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select"):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("levels", [4, 100_000])
def test_the_device_is_asked_once(levels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With ties and without: flags of all rows are read together."""
    draw = torch.Generator().manual_seed(2)
    logits = torch.randint(0, levels, (6, 900), generator=draw).float()
    with _Asked() as asked:
        assert bool(logits.any())
        assert len(logits.nonzero()) > 0
    assert asked.names == ["_local_scalar_dense", "nonzero"]
    read: list[Tensor] = []
    tolist = Tensor.tolist

    def reading(flags: Tensor) -> Any:
        read.append(flags)
        return tolist(flags)

    monkeypatch.setattr(Tensor, "tolist", reading)
    with _Asked() as asked:
        topk_lse(logits, 8)
    assert asked.names == []
    assert [flags.shape for flags in read] == [(2, 6)]
    assert bool(read[0][0].any()) == (levels == 4)


def test_no_rows() -> None:
    for vocab in (9, 9000):
        out = topk_lse(torch.empty(0, vocab), 4)
        assert out.ids_NK.shape == (0, 4)
        assert out.tail_N.shape == (0,)
        assert argmax(torch.empty(0, vocab))[0].shape == (0,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_broken_logits_are_refused(bad: float) -> None:
    logits = torch.zeros(2, 9)
    logits[1, 5] = bad
    with pytest.raises(ModelError, match="no finite maximum"):
        topk_lse(logits, 3)


def test_barred_rows_and_empty_lists_are_refused() -> None:
    with pytest.raises(ModelError, match="no finite maximum"):
        topk_lse(torch.full((1, 4), -torch.inf), 2)
    with pytest.raises(ValueError, match="k >= 1"):
        topk_lse(torch.zeros(1, 4), 0)
