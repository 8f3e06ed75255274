"""Packed linear layers agree with plain ones, and every doubt ends in the plain layer."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from draftkeep.serve.passes.packed import PackedLinear, pack_linears


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(64, 32), (7, 33), (1, 5)])
def test_a_packed_layer_agrees_at_every_width(shape: Any, bias: Any) -> None:
    plain = nn.Linear(shape[1], shape[0], bias=bias)
    twin = PackedLinear(plain.weight, plain.bias)
    with torch.inference_mode():
        for rows in (1, 2, 3, 5, 9, 40, 129):
            for x in (torch.randn(rows, shape[1]), torch.randn(2, rows, shape[1])):
                torch.testing.assert_close(twin(x), plain(x), rtol=1e-5, atol=1e-5)


def test_a_tied_head_is_packed_and_the_embedding_goes_on_working(lab: Any) -> None:
    model = copy.deepcopy(lab.target())
    model.lm_head.weight = model.model.embed_tokens.weight
    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        before = model(input_ids=ids, use_cache=False).logits
        assert pack_linears(model, "always") == 15
        assert isinstance(model.lm_head, PackedLinear)
        after = model(input_ids=ids, use_cache=False).logits
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)


def test_never_packs_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    assert pack_linears(model, "never") == 0
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(("packed_s", "count"), [(1.0, 3), (1.7, 3), (1.9, 0), (3.0, 0)])
def test_a_shape_is_packed_where_that_was_clearly_faster(packed_s: Any, count: Any) -> None:
    """The clock is read around ten calls at four widths, packed and plain in turn, once a shape."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    ticks = []
    for seconds in [packed_s, 2.0] * 40:
        ticks += [0.0, seconds]
    times = iter(ticks)
    assert pack_linears(model, "measured", clock=lambda: next(times)) == count
    assert next(times, None) is None


def _missing(*_: Any) -> None:
    raise AttributeError("no such operator")


def _unsupported(*_: Any) -> None:
    raise RuntimeError("could not create a primitive")


def _wrong(x: Any, weight: Any, bias: Any, *_: Any) -> Any:
    return torch.zeros(*x.shape[:-1], 8)


@pytest.mark.parametrize(
    ("operator", "fault"),
    [
        ("_reorder_linear_weight", _missing),
        ("_reorder_linear_weight", _unsupported),
        ("_linear_pointwise", _missing),
        ("_linear_pointwise", _unsupported),
        ("_linear_pointwise", _wrong),
    ],
)
def test_an_operator_that_is_missing_unsupported_or_wrong_leaves_the_layer(
    monkeypatch: Any, operator: Any, fault: Any
) -> None:
    class Operators:
        _reorder_linear_weight = staticmethod(torch.ops.mkldnn._reorder_linear_weight)
        _linear_pointwise = staticmethod(torch.ops.mkldnn._linear_pointwise)

    setattr(Operators, operator, staticmethod(fault))

    class Namespace:
        mkldnn = Operators

    monkeypatch.setattr(torch, "ops", Namespace)
    model = nn.Sequential(nn.Linear(8, 8))
    assert pack_linears(model, "always") == 0
    assert type(model[0]) is nn.Linear


def test_other_precisions_stay_plain() -> None:
    model = nn.Sequential(nn.Linear(8, 8).to(torch.bfloat16))
    assert pack_linears(model, "always") == 0
