"""Targets: finding, converting and loading the served model.

A target is `smollm2` (packaged, converted once), `tiny` (a seeded toy, built once), a directory
made by `save_pretrained`, or a hub name. `python -m draftkeep.store.models.target NAME` does the
one-time work of the first two.
"""

import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from draftkeep.errors import ModelError
from draftkeep.store.models.fingerprint import fingerprints
from draftkeep.store.models.servable import check_servable, read_config
from draftkeep.store.models.smollm2 import convert_smollm2
from draftkeep.store.models.tiny import build_tiny

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_WANTED = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "*.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetModel:
    """A loaded target: evaluation mode, sdpa attention, gradients off.

    `model` is a transformers causal language model, `tokenizer` its fast tokenizer, `directory`
    holds their files. `vocab` is how many token ids its logits cover, `eos_ids` every id that ends
    an output, ascending. `chat_template_hash` is SHA-256 of the template's UTF-8 text, or empty
    bytes where there is none. The owner may move `model`, and must not change its weights.
    """

    model: Any
    tokenizer: Any
    name: str
    directory: Path
    target_fingerprint: bytes
    tokenizer_fingerprint: bytes
    chat_template_hash: bytes
    vocab: int
    eos_ids: tuple[int, ...]


def default_cache_dir() -> Path:
    """DRAFTKEEP_CACHE, or ~/.cache/draftkeep."""
    named = os.environ.get("DRAFTKEEP_CACHE")
    return Path(named) if named else Path.home() / ".cache" / "draftkeep"


def load_target(
    name: str,
    *,
    cache_dir: Path | None = None,
    device: str = "cpu",
    dtype: str = "float32",
    progress: bool = False,
) -> TargetModel:
    """Load a target by name; the first use of `smollm2` and `tiny` prepares it in `cache_dir`.

    `device` is torch's name of where the weights go, `dtype` one of float32, bfloat16 and float16.
    Raises ModelError, naming the remedy, for a model that is missing or cannot be served, where
    possible before its weights are read, for a device that is not there and for another dtype.
    `progress` lets transformers draw its bars.
    """
    if dtype not in _DTYPES:
        raise ModelError(f"dtype {dtype!r:.40} is unknown; choose one of {', '.join(_DTYPES)}")
    place = _device(device)
    cache = cache_dir if cache_dir is not None else default_cache_dir()
    with _bars(progress):
        directory = prepare(name, cache_dir=cache)
        config = read_config(_config(directory), where=name)
        check_servable(config, where=name)
        marks = fingerprints(directory, cache_dir=cache)
        model: Any = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=_DTYPES[dtype],
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=False,
        )
        tokenizer = AutoTokenizer.from_pretrained(directory)
    model.eval().requires_grad_(False)
    model.to(place)
    template = tokenizer.chat_template
    return TargetModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        directory=directory,
        target_fingerprint=marks.target,
        tokenizer_fingerprint=marks.tokenizer,
        chat_template_hash=hashlib.sha256(template.encode()).digest()
        if isinstance(template, str)
        else b"",
        vocab=int(model.get_output_embeddings().weight.shape[0]),
        eos_ids=eos_ids(model, tokenizer),
    )


def prepare(name: str, *, cache_dir: Path) -> Path:
    """The directory of a target, made first where it is `smollm2` or `tiny`."""
    if name == "smollm2":
        return convert_smollm2(cache_dir)
    if name == "tiny":
        return build_tiny(cache_dir)
    directory = Path(name)
    if directory.is_dir():
        return directory
    if _HUB_NAME.fullmatch(name):
        return _from_hub(name)
    raise ModelError(
        f"no target named {name!r:.80}; expected smollm2, tiny, a directory that holds "
        "config.json, or a hub name such as owner/model"
    )


def _device(name: str) -> torch.device:
    """The device of that name, checked before gigabytes are read for it."""
    try:
        place = torch.device(name)
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError, ImportError, NotImplementedError) as error:
        raise ModelError(
            f"torch has no device {name!r:.40} here ({type(error).__name__}); use cpu, or install "
            "a torch built for it"
        ) from None
    return place


def eos_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    """The ids that end an output, from generation config, config and tokenizer, ascending."""
    found: set[int] = set()
    for owner in (getattr(model, "generation_config", None), model.config, tokenizer):
        value = getattr(owner, "eos_token_id", None)
        if isinstance(value, int):
            found.add(value)
        elif value is not None:
            found.update(int(item) for item in value)
    return tuple(sorted(found))


@contextmanager
def _bars(wanted: bool) -> Iterator[None]:
    """Progress bars off inside the block unless wanted; the library's setting comes back after."""
    switch: Any = logging
    if wanted or not switch.is_progress_bar_enabled():
        yield
        return
    switch.disable_progress_bar()
    try:
        yield
    finally:
        switch.enable_progress_bar()


def _config(directory: Path) -> dict[str, Any]:
    try:
        value = json.loads((directory / "config.json").read_bytes())
    except OSError as error:
        raise ModelError(f"cannot read {directory / 'config.json'}: {error.strerror}") from None
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ModelError(f"{directory / 'config.json'} is not a JSON object; copy the model again")
    return value


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(_WANTED)))
    except Exception as error:  # the hub client raises many unrelated types
        raise ModelError(
            f"cannot fetch {name} ({type(error).__name__}); check the name and the network, or "
            "give a local directory"
        ) from None


def main(names: list[str]) -> int:
    """Prepare each named target and print one line for it; the installation step."""
    for name in names or ["smollm2"]:
        try:
            with _bars(False):
                directory = prepare(name, cache_dir=default_cache_dir())
        except ModelError as error:
            print(f"draftkeep: {error}", file=sys.stderr)
            return 1
        print(f"{name} is ready in {directory}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
