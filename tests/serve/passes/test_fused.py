"""The fused decoder computes what the stock one does, over the same weights, or is not used."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from draftkeep.errors import ModelError
from draftkeep.serve.passes.cache import SlotCache
from draftkeep.serve.passes.fused import FusedDecoder, RootMeanSquare
from draftkeep.serve.passes.packed import PackedLinear
from draftkeep.serve.passes.rectangle import Segment
from draftkeep.serve.passes.runner import ModelRunner, StockDecoder
from tests.serve.families import FUSED, STOCK, build

IDS = [(5 * index + 3) % 48 for index in range(90)]


def _plain(model: Any, ids: list[int]) -> Any:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def _ragged(runner: ModelRunner) -> tuple[Any, Any]:
    """Logits of one long and one short row: by chunks, together, rewound; and the ids they saw."""
    runner.prefill([Segment(slot=1, tokens=IDS[:70], start=0)])
    runner.forward([Segment(slot=1, tokens=[1, 2, 3], start=70, want=3)])
    both = [
        Segment(slot=1, tokens=IDS[70:75], start=70, want=5),
        Segment(slot=2, tokens=IDS[:2], start=0, want=2),
    ]
    single = Segment(slot=1, tokens=IDS[75:76], start=75, want=1)
    return runner.forward(both), runner.forward([single])


@pytest.mark.parametrize("packing", ["never", "always"])
@pytest.mark.parametrize("family", [*FUSED, *STOCK])
def test_every_family_gives_plain_logits(family: Any, packing: Any) -> None:
    model = build(family)
    expected = _plain(model, IDS[:76])
    runner = ModelRunner(copy.deepcopy(model), slots=4, context=100, packing=packing)
    assert isinstance(runner._decode, FusedDecoder if family in FUSED else StockDecoder)
    both, single = _ragged(runner)
    wanted = torch.cat([expected[70:75], _plain(model, IDS[:2])])
    torch.testing.assert_close(both, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(single, expected[75:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Granite", {"residual_multiplier": 0.5}),
        ("Granite", {"embedding_multiplier": 3.0}),
        ("Granite", {"attention_multiplier": 0.01}),
        ("SmolLM3", {"no_rope_layers": [1, 0]}),
        ("Gemma", {"head_dim": 8}),
        ("StableLm", {"partial_rotary_factor": 0.5}),
    ],
)
def test_a_model_that_only_looks_alike_is_served_right(family: Any, changes: Any) -> None:
    """Whatever the stock decoder does beside the weights, the logits stay the model's own."""
    model = build(family, **changes)
    expected = _plain(model, IDS[:76])
    runner = ModelRunner(copy.deepcopy(model), slots=4, context=100, packing="never")
    both, single = _ragged(runner)
    torch.testing.assert_close(both[:5], expected[70:75], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(single, expected[75:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", ["hook", "bias", "activation"])
def test_a_layer_somebody_changed_is_not_fused_past_the_change(change: Any) -> None:
    model = build("llama")
    layer = model.model.layers[1]
    if change == "hook":
        layer.mlp.register_forward_hook(lambda module, args, output: output * 1.5)
    elif change == "bias":
        layer.self_attn.k_proj.bias = nn.Parameter(torch.ones(16))
    else:
        layer.mlp.act_fn = nn.Sequential(nn.ReLU(), nn.Tanh())
    expected = _plain(model, IDS[:76])
    runner = ModelRunner(model, slots=4, context=100, packing="never")
    both, _ = _ragged(runner)
    torch.testing.assert_close(both[:5], expected[70:75], rtol=1e-4, atol=1e-4)


def test_no_weight_is_held_twice() -> None:
    model = build("llama")
    count = sum(parameter.numel() for parameter in model.parameters())
    fusing = FusedDecoder(model.model, SlotCache(layers=2, slots=2, context=100), 100)
    expected = _plain(model, IDS[:20])
    spaces = {
        parameter.untyped_storage().data_ptr(): parameter.untyped_storage().nbytes()
        for module in (model, fusing)
        for parameter in module.parameters()
    }
    assert sum(spaces.values()) == 4 * count
    torch.testing.assert_close(_plain(model, IDS[:20]), expected, rtol=0, atol=0)
    runner = ModelRunner(build("llama"), slots=2, context=100, packing="always")
    parts = nn.ModuleList(runner._parts)
    embedding, last_norm = 48 * 32, 32
    assert sum(parameter.numel() for parameter in parts.parameters()) == embedding + last_norm
    assert sum(isinstance(module, PackedLinear) for module in parts.modules()) == 9


@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("shape", [(3, 64), (3, 5, 64)])
def test_the_norm_is_the_root_mean_square(shape: Any, scale: Any) -> None:
    x = scale * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(shape[1:], generator=torch.Generator().manual_seed(2))
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    for norm in (RootMeanSquare(weight, 1e-5), RootMeanSquare(weight.bfloat16(), 1e-5)):
        found = norm(x.to(norm.weight.dtype)).double()
        rough = norm.weight.dtype != torch.float32
        torch.testing.assert_close(
            found, exact, rtol=2e-2 if rough else 2e-6, atol=2e-2 if rough else 1e-6
        )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 6e-2), (torch.float16, 1e-2)])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_other_precisions_agree_as_far_as_they_can(family: Any, dtype: Any, tolerance: Any) -> None:
    model = build(family).to(dtype)
    expected = _plain(model, IDS[:76]).float()
    runner = ModelRunner(model, slots=4, context=100, packing="always")
    both, _ = _ragged(runner)
    assert both.dtype == torch.float32
    gap = (both[:5] - expected[70:75]).abs().max() / expected.abs().max()
    assert float(gap) <= tolerance


def test_a_damaged_norm_is_refused() -> None:
    model = build("qwen3")
    model.model.layers[1].self_attn.q_norm.weight[0] = torch.nan
    with pytest.raises(ModelError, match=r"differ|not numbers"):
        ModelRunner(model, slots=2, context=100)
