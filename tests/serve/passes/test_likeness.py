"""A decoder is fused where it is built like Llama's and nobody's code runs in it; else it says why.

Whichever decoder runs, its logits are the model's own.
"""

import re
from functools import wraps
from typing import Any

import pytest
import torch
from torch import nn

from draftkeep.errors import ModelError
from draftkeep.serve.passes.fused import FusedDecoder
from draftkeep.serve.passes.likeness import unlike
from draftkeep.serve.passes.packed import PackedLinear
from draftkeep.serve.passes.rectangle import Segment
from draftkeep.serve.passes.runner import ModelRunner
from tests.serve.families import FUSED, STOCK, build

IDS = [3, 8, 13, 18]
ROW = Segment(slot=1, tokens=IDS, start=0, want=len(IDS))


def _runner(model: Any, **options: Any) -> tuple[ModelRunner, list[tuple[str, BaseException]]]:
    """A runner whose logits are the model's own, and the problems it told of."""
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]
    problems: list[tuple[str, BaseException]] = []
    runner = ModelRunner(
        model,
        slots=2,
        context=64,
        on_problem=lambda kind, error: problems.append((kind, error)),
        **options,
    )
    torch.testing.assert_close(runner.forward([ROW]), expected, rtol=1e-4, atol=1e-4)
    return runner, problems


@pytest.mark.parametrize("family", FUSED)
def test_a_family_of_that_build_is_fused(family: Any) -> None:
    runner, problems = _runner(build(family), packing="never")
    assert (runner.decoder, problems) == ("fused", [])


@pytest.mark.parametrize("family", STOCK)
def test_another_family_runs_its_own_modules_and_that_is_no_problem(family: Any) -> None:
    runner, problems = _runner(build(family), packing="never")
    assert runner.decoder.startswith("stock: ")
    assert "has other parts than a Llama's" in runner.decoder
    assert problems == []


def test_a_model_that_only_looks_alike_is_a_problem_told_once() -> None:
    runner, problems = _runner(build("Granite", residual_multiplier=0.5), packing="never")
    assert runner.decoder.startswith("stock: the fused one's cached passes differ from plain ones")
    [(kind, error)] = problems
    assert kind == "the fused decoder"
    assert isinstance(error, ModelError)
    assert "the model's own modules run instead" in str(error)


@pytest.mark.parametrize("method", ["__init__", "forward"])
def test_a_mistake_of_our_own_is_a_problem_told_once(method: Any, monkeypatch: Any) -> None:
    mistake = TypeError("a mistake in the fused decoder")

    def failing(*_: Any) -> None:
        raise mistake

    monkeypatch.setattr(FusedDecoder, method, failing)
    runner, problems = _runner(build("llama"), packing="never")
    assert runner.decoder == "stock: the fused one failed with TypeError"
    assert problems == [("the fused decoder", mistake)]


def _without_norm(model: Any) -> None:
    del model.model.layers[1].post_attention_layernorm


def _with_gate(model: Any) -> None:
    model.model.layers[1].self_attn.gate = nn.Linear(32, 4)


def _packed(model: Any) -> None:
    up = model.model.layers[1].mlp.up_proj
    model.model.layers[1].mlp.up_proj = PackedLinear(up.weight, None)


def _one_bias(model: Any) -> None:
    model.model.layers[1].self_attn.k_proj.bias = nn.Parameter(torch.ones(32))


def _norm_with_bias(model: Any) -> None:
    model.model.norm = nn.LayerNorm(32)


def _other_epsilon(model: Any) -> None:
    model.model.layers[1].self_attn.q_norm.variance_epsilon = 0.5


def _half_rotation(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq[:4]


def _nameless_scale(model: Any) -> None:
    del model.model.layers[1].self_attn.scaling


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_without_norm, "Qwen3DecoderLayer has other parts .*post_attention_layernorm"),
        (_with_gate, "Qwen3Attention has other parts .*gate"),
        (_packed, "a PackedLinear, not a plain linear layer"),
        (_one_bias, "only some of the joined"),
        (_norm_with_bias, "LayerNorm is no norm of a weight"),
        (_other_epsilon, "different epsilons"),
        (_half_rotation, "does not cover the whole head"),
        (_nameless_scale, "does not name its head's width and scale"),
    ],
)
def test_every_difference_of_build_is_named(change: Any, words: Any) -> None:
    model = build("qwen3")
    assert unlike(model.model) is None
    change(model)
    assert re.search(words, unlike(model.model) or "")


def _pre_hook(module: Any, calls: list[int]) -> None:
    module.register_forward_pre_hook(lambda module, args: calls.append(1))


def _hook(module: Any, calls: list[int]) -> None:
    module.register_forward_hook(lambda module, args, output: calls.append(1))


def _own_forward(module: Any, calls: list[int]) -> None:
    inner = module.forward

    @wraps(inner)
    def forward(*args: Any, **named: Any) -> Any:
        calls.append(1)
        return inner(*args, **named)

    module.forward = forward


@pytest.mark.parametrize("install", [_pre_hook, _hook, _own_forward])
@pytest.mark.parametrize(
    "place", ["model", "model.embed_tokens", "model.layers.1", "model.layers.0.self_attn.v_proj"]
)
def test_code_on_the_decoder_runs_at_every_pass_and_is_no_problem(install: Any, place: Any) -> None:
    """It changes nothing, so no comparison of logits could tell that it was passed over."""
    model = build("llama")
    calls: list[int] = []
    install(model.get_submodule(place), calls)
    runner, problems = _runner(model, packing="always", graphs="fixed")
    assert "runs hooks or a forward of its own" in runner.decoder
    assert problems == []
    for _ in range(3):
        calls.clear()
        runner.forward([ROW])
        assert calls == [1]


def test_a_hook_on_the_head_runs_at_every_pass_over_a_fused_decoder() -> None:
    model = build("llama")
    calls: list[int] = []
    _hook(model.lm_head, calls)
    runner, _ = _runner(model, packing="always", graphs="fixed")
    assert runner.decoder == "fused"
    assert runner._fixed is None
    calls.clear()
    runner.forward([ROW])
    assert calls == [1]


@pytest.mark.parametrize("install", [_pre_hook, _hook, _own_forward])
def test_code_around_the_whole_model_is_refused(install: Any) -> None:
    model = build("llama")
    install(model, [])
    with pytest.raises(ModelError, match="around the whole"):
        ModelRunner(model, slots=2, context=64)
