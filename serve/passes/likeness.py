"""Whether a decoder is built as Llama's, Qwen2's and Qwen3's are, and whose code runs in it.

What is looked at are modules and their parts, not what they compute: a build can look alike and
compute something else, which a trial pass has to show.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

_DECODER = ("embed_tokens", "layers", "norm", "rotary_emb")
_LAYER = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_HEAD_NORMS = ("q_norm", "k_norm")
_MLP = ("gate_proj", "up_proj", "down_proj", "act_fn")


def hooked(module: nn.Module) -> bool:
    """Whether a call of this module runs code that its class does not have.

    That is a forward hook, before or after, or a `forward` of this one object. The modules inside
    are not looked at.
    """
    return bool(module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def unlike(decoder: nn.Module) -> str | None:
    """The first reason why FusedDecoder cannot be tried on `decoder`, or None.

    It names classes and parts, never content.
    """
    return next(_reasons(decoder), None)


def eps_of(norm: Any) -> float | None:
    """The epsilon of a norm, under either of the names that transformers uses."""
    eps = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return None if eps is None else float(eps)


def _reasons(decoder: Any) -> Iterator[str]:
    for module in decoder.modules():
        if hooked(module):
            yield f"its {type(module).__name__} runs hooks or a forward of its own"
    yield from _parts(decoder, _DECODER)
    yield from _norm(decoder.norm)
    for layer in decoder.layers:
        yield from _parts(layer, _LAYER)
        yield from _norm(layer.input_layernorm)
        yield from _norm(layer.post_attention_layernorm)
        yield from _attention(layer.self_attn)
        yield from _parts(layer.mlp, _MLP)
        yield from _joinable([layer.mlp.gate_proj, layer.mlp.up_proj])
        yield from _joinable([layer.mlp.down_proj])
        yield from _rotation(decoder, layer.self_attn.head_dim)


def _attention(attention: Any) -> Iterator[str]:
    with_norms = hasattr(attention, _HEAD_NORMS[0])
    yield from _parts(attention, (*_ATTENTION, *_HEAD_NORMS) if with_norms else _ATTENTION)
    if not (hasattr(attention, "head_dim") and hasattr(attention, "scaling")):
        yield f"{type(attention).__name__} does not name its head's width and scale"
    yield from _joinable([attention.q_proj, attention.k_proj, attention.v_proj])
    yield from _joinable([attention.o_proj])
    if with_norms:
        norms = [getattr(attention, name) for name in _HEAD_NORMS]
        for norm in norms:
            yield from _norm(norm)
        if eps_of(norms[0]) != eps_of(norms[1]):
            yield "its norms of queries and keys have different epsilons"


def _parts(module: nn.Module, names: Sequence[str]) -> Iterator[str]:
    """A reason where the children of the module are not exactly these."""
    found = {name for name, _ in module.named_children()}
    if odd := found ^ set(names):
        kind = type(module).__name__
        yield f"{kind} has other parts than a Llama's ({', '.join(sorted(odd))})"


def _norm(norm: nn.Module) -> Iterator[str]:
    if [name for name, _ in norm.named_parameters()] != ["weight"] or eps_of(norm) is None:
        yield f"{type(norm).__name__} is no norm of a weight and an epsilon"


def _joinable(linears: Sequence[nn.Module]) -> Iterator[str]:
    """A reason where these projections of one input cannot be one product."""
    if odd := [linear for linear in linears if type(linear) is not nn.Linear]:
        yield f"a projection is a {type(odd[0]).__name__}, not a plain linear layer"
    elif len({linear.bias is None for linear in linears}) > 1:
        yield "only some of the joined projections have a bias"


def _rotation(decoder: Any, depth: int) -> Iterator[str]:
    weight_VC = decoder.embed_tokens.weight
    with torch.inference_mode():
        cos_11D, _ = decoder.rotary_emb(weight_VC, weight_VC.new_zeros((1, 1), dtype=torch.long))
    if cos_11D.shape[-1] != depth:
        yield "its rotation does not cover the whole head"
