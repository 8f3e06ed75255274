"""Tiny seeded models of the families the engine serves, and of some it does not."""

from typing import Any

import torch
import transformers

_SHAPE: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GPT2: dict[str, Any] = {
    "vocab_size": 48,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 256,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
_YARN["original_max_position_embeddings"] = 64

# Name: class prefix, and what differs from the shape above.
FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SHAPE),
    "llama with every bias": ("Llama", _SHAPE | {"attention_bias": True, "mlp_bias": True}),
    "llama with yarn": ("Llama", _SHAPE | {"rope_parameters": _YARN}),
    "llama with a tied head": ("Llama", _SHAPE | {"tie_word_embeddings": True}),
    "llama without shared heads": ("Llama", _SHAPE | {"num_key_value_heads": 4}),
    "qwen2": ("Qwen2", _SHAPE),
    "qwen3": ("Qwen3", _SHAPE | {"head_dim": 16}),
    "mistral": ("Mistral", _SHAPE | {"sliding_window": None}),
}
STOCK: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", _GPT2),
    "olmo2": ("Olmo2", _SHAPE),
    "mixtral": (
        "Mixtral",
        _SHAPE | {"sliding_window": None, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}


def build(family: str, *, attention: str = "sdpa", **changes: Any) -> Any:
    """A seeded model with random norms and biases too, so that none of them is neutral."""
    prefix, values = (FUSED | STOCK).get(family, (family, _SHAPE))
    torch.manual_seed(4)
    config = getattr(transformers, f"{prefix}Config")(**(values | changes))
    config._attn_implementation = attention
    name = f"{prefix}LMHeadModel" if prefix == "GPT2" else f"{prefix}ForCausalLM"
    model = getattr(transformers, name)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model.train(False).requires_grad_(False)
