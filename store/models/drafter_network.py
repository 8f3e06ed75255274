"""The body of a drafter: a target's first layers with a head over some of its vocabulary.

Shapes: V target vocabulary, D drafter vocabulary (vocab_ids_D[i] is the target id of row i),
C hidden size.
"""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from draftkeep.errors import ModelError


def check_family(model: Any) -> None:
    """Raise ModelError unless the model is built as Llama-like ones are."""
    body = getattr(model, "model", None)
    parts = ("embed_tokens", "layers", "norm")
    if (
        body is None
        or any(not hasattr(body, part) for part in parts)
        or (getattr(model, "lm_head", None) is None)
    ):
        raise ModelError(
            f"a drafter cannot be cut from {type(model).__name__}: expected model.embed_tokens, "
            "model.layers, model.norm and lm_head, as Llama-like models have"
        )


def build_network(config: PretrainedConfig, *, embedding_VC: Tensor, head_DC: Tensor) -> Any:
    """A causal LM of this config with the given embeddings (frozen) and head, on the CPU.

    The embedding tensor is used as it is, not copied. The layers and the final norm hold random
    numbers until the caller loads them.
    """
    small = copy.deepcopy(config)
    # Embeddings and head are replaced below; building them at full size would cost seconds.
    small.vocab_size, small.pad_token_id = 1, None
    maker: Any = AutoModelForCausalLM
    model = maker.from_config(small, dtype=embedding_VC.dtype, attn_implementation="sdpa")
    check_family(model)
    model.model.embed_tokens = nn.Embedding(
        embedding_VC.shape[0], embedding_VC.shape[1], device="meta"
    )
    model.model.embed_tokens.weight = nn.Parameter(embedding_VC, requires_grad=False)
    model.lm_head = nn.Linear(head_DC.shape[1], head_DC.shape[0], bias=False, device="meta")
    model.lm_head.weight = nn.Parameter(head_DC)
    model.config.vocab_size = embedding_VC.shape[0]
    model.config.pad_token_id = config.pad_token_id
    model.model.vocab_size = model.vocab_size = embedding_VC.shape[0]
    return model.eval()


def drafter_config(target: PretrainedConfig, *, layers: int) -> PretrainedConfig:
    """The target's config cut to its first layers, with a head of its own."""
    have = int(target.num_hidden_layers)
    if not 1 <= layers <= have:
        raise ModelError(f"{layers} layers asked of a target with {have}; choose 1 to {have}")
    config = copy.deepcopy(target)
    config.num_hidden_layers = layers
    config.tie_word_embeddings = False
    # The path the target was loaded from would be written into the drafter and change its digest.
    config._name_or_path = ""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        config.layer_types = list(kinds)[:layers]
    return config


def copy_first_layers(target: Any, drafter: Any) -> None:
    """Copy the target's first layers and final norm into the drafter, value for value."""
    check_family(target)
    with torch.no_grad():
        pairs = zip(drafter.model.layers, target.model.layers, strict=False)
        for mine, theirs in [*pairs, (drafter.model.norm, target.model.norm)]:
            mine.load_state_dict(theirs.state_dict())


def lowest_ids(target: Any, *, vocab: int, keep: tuple[int, ...]) -> Tensor:
    """`keep` plus the lowest other ids, `vocab` in all (fewer where V is smaller), ascending.

    Byte-pair merges are made in order of frequency, so low ids are the frequent pieces.
    """
    total = int(target.get_output_embeddings().weight.shape[0])
    chosen = {token for token in keep if 0 <= token < total}
    for token in range(total):
        if len(chosen) >= vocab:
            break
        chosen.add(token)
    return torch.tensor(sorted(chosen), dtype=torch.int64)


def check_vocab_ids(vocab_ids_D: Tensor, *, total: int) -> None:
    """Raise ModelError unless the ids are distinct, ascending and inside the target's range."""
    ids = vocab_ids_D
    if ids.ndim != 1 or ids.numel() == 0 or int(ids.min()) < 0 or int(ids.max()) >= total:
        raise ModelError(f"the drafter's vocabulary must be ids in 0..{total - 1}, at least one")
    if bool((ids[1:] <= ids[:-1]).any()):
        raise ModelError("the drafter's vocabulary must be distinct ids in ascending order")


def parameters_per_token(model: Any) -> int:
    """Parameters one decoded token is multiplied with: layers, norms and head.

    An embedding lookup reads one row and multiplies nothing, so it does not count; a head tied to
    the embeddings does.
    """
    head = model.get_output_embeddings().weight.numel()
    norm = sum(parameter.numel() for parameter in model.model.norm.parameters())
    return int(head + norm + sum(p.numel() for p in model.model.layers.parameters()))
