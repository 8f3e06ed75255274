"""Models the engine refuses from their config and class alone, with the reason."""

import inspect
from collections.abc import Iterator
from typing import Any

from transformers import PreTrainedModel

from draftkeep.errors import ModelError
from draftkeep.serve.passes import attention
from draftkeep.serve.passes.likeness import hooked

# These change the frequencies of a row with the length of the longest one beside it.
_LENGTH_DEPENDENT = {"dynamic", "longrope"}
_NEUTRAL = {
    "final_logit_softcapping": (None,),
    "attn_logit_softcapping": (None,),
    "logit_scale": (None, 1, 1.0),
    "logits_scaling": (None, 1, 1.0),
}


def refuse(model: PreTrainedModel, context: int) -> None:
    """Raise ModelError, naming every reason, where the model cannot be served at all.

    What no config tells is left to the runner's comparison with the model's own passes.
    """
    if reasons := list(_reasons(model, context)):
        raise ModelError(
            f"{type(model).__name__} cannot be served: {'; '.join(reasons)}; use a decoder-only "
            "model with full attention and a plain head"
        )


def _reasons(model: PreTrainedModel, context: int) -> Iterator[str]:
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        yield "it is an encoder-decoder"
    media = [name for name in ("vision_config", "audio_config") if hasattr(config, name)]
    if media:
        yield f"it reads more than text ({', '.join(media)})"
    yield from _state(model)
    yield from _attention(config)
    limit = int(getattr(config, "max_position_embeddings", None) or context)
    if limit < context:
        yield f"it reads {limit} positions but {context} were asked for, lower max_context"
    if hooked(model):
        yield (
            "it runs hooks or a forward of its own around the whole, which is run in parts, put "
            "them on its decoder or its head"
        )
    if model.get_output_embeddings() is None:  # type: ignore[no-untyped-call]
        yield "it has no head that writes tokens"
    for name, neutral in _NEUTRAL.items():
        if (value := getattr(config, name, None)) not in neutral:
            yield f"its scores are changed by {name} = {value}"


def _state(model: PreTrainedModel) -> Iterator[str]:
    """Reasons why its past cannot be kept by position."""
    if getattr(model, "_is_stateful", False):
        yield "it keeps a recurrent state, which cannot be rewound by position"
        return
    names = set(inspect.signature(model.base_model.forward).parameters)
    if not names & {"cache", "past_key_values"}:
        yield "it keeps no key-value cache"
    elif "position_ids" not in names:
        yield "it takes no position_ids, so rows cannot differ in length"


def _attention(config: Any) -> Iterator[str]:
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        yield f"it has layers of kind {', '.join(sorted(kinds))}"
    elif (window := getattr(config, "sliding_window", None)) is not None:
        yield f"it uses a sliding window of {window} tokens"
    implementation = getattr(config, "_attn_implementation", None)
    if implementation not in ("sdpa", attention.NAME):
        yield (
            f"it was loaded with {implementation!r} attention instead of sdpa, load it with "
            "attn_implementation='sdpa'"
        )
    rope = getattr(config, "rope_parameters", None) or {}
    if (kind := rope.get("rope_type")) in _LENGTH_DEPENDENT:
        yield f"its {kind} rotation depends on the length of the rows beside it"
