"""A drafter for other loaders: the full vocabulary, no files of our own.

Shapes: V target vocabulary, D drafter vocabulary, C hidden size.
"""

import copy
from pathlib import Path

import safetensors.torch

from draftkeep.errors import ModelError
from draftkeep.files import new_directory
from draftkeep.store.models.drafter import Drafter
from draftkeep.store.models.drafter_files import CONFIG_FILE, TOKENIZER_FILES, WEIGHTS_FILE


def export_full_vocab(drafter: Drafter, directory: Path) -> None:
    """Write a directory that transformers and vLLM load unchanged, with a head over all V ids.

    An id the drafter cannot propose gets the mean of its head rows. A mean of logits is never above
    the largest of them, so greedy proposals stay the same token by token, and the relative
    probabilities of the drafter's own ids stay the same at every temperature. A head without a bias
    cannot bar an id altogether, so some mass moves to the others when sampling: measure acceptance
    again before use. Raises ModelError where `directory` exists.
    """
    if directory.exists():
        raise ModelError(f"{directory} exists; export to a new directory")
    head_DC = drafter.model.lm_head.weight.detach().cpu()
    total = int(drafter.model.config.vocab_size)
    head_VC = head_DC.mean(dim=0, keepdim=True).repeat(total, 1)
    head_VC[drafter.vocab_ids] = head_DC
    tensors = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in drafter.model.state_dict().items()
    }
    tensors["lm_head.weight"] = head_VC
    config = copy.deepcopy(drafter.model.config)
    config.architectures = [type(drafter.model).__name__]
    config.dtype = head_DC.dtype
    with new_directory(directory) as building:
        (building / WEIGHTS_FILE).write_bytes(
            safetensors.torch.save(tensors, metadata={"format": "pt"})
        )
        (building / CONFIG_FILE).write_text(config.to_json_string(), encoding="utf-8")
        for name in TOKENIZER_FILES:
            source = drafter.tokenizer_dir / name
            if source.is_file():
                (building / name).write_bytes(source.read_bytes())
