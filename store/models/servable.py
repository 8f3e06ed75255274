"""Which transformers models this engine can serve, decided from the config before any weight."""

from typing import Any

from transformers import AutoConfig, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from draftkeep.errors import ModelError


def read_config(data: dict[str, Any], *, where: str) -> PretrainedConfig:
    """A transformers config from the object of a config.json; no code of the model's own is run."""
    if "auto_map" in data:
        raise ModelError(
            f"{where} needs code of its own (auto_map), which is never run; use a "
            "model whose class is part of transformers"
        )
    values = {key: value for key, value in data.items() if key != "model_type"}
    try:
        config: PretrainedConfig = AutoConfig.for_model(str(data.get("model_type")), **values)
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(
            f"{where}: config.json names model type {data.get('model_type')!r:.40}, which this "
            f"transformers cannot build ({type(error).__name__})"
        ) from None
    return config


def check_servable(config: PretrainedConfig, *, where: str) -> None:
    """Raise ModelError, with the reason, unless the model is a plain decoder this engine serves.

    The engine keeps one static cache written at per-row positions and passes its own masks, so it
    needs full attention in every layer, no recurrent state and the sdpa implementation.
    """
    reason = _reason(config)
    if reason is not None:
        raise ModelError(
            f"{where} cannot be served: {reason}; use a decoder-only model with full attention"
        )


def _reason(config: PretrainedConfig) -> str | None:
    if config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return f"model type {config.model_type} has no causal language model in transformers"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantised"
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        return f"it uses a sliding window of {window} tokens"
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention"}
    if kinds:
        return f"it has layers of kind {', '.join(sorted(kinds))}"
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(model_class, "_is_stateful", False):
        return "it keeps a recurrent state"
    if not getattr(model_class, "_supports_sdpa", False):
        return "it has no sdpa attention"
    return None
