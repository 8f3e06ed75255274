"""Drafters: cut from a target, written once, verified before they are loaded.

Shapes: V target vocabulary, D drafter vocabulary, C hidden size.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from draftkeep.errors import ModelError
from draftkeep.store.models.drafter_files import (
    CONFIG_FILE,
    TOKENIZER_FILES,
    WEIGHTS_FILE,
    check_signature,
    need,
    read_verified,
    write_files,
)
from draftkeep.store.models.drafter_network import (
    build_network,
    check_family,
    check_vocab_ids,
    copy_first_layers,
    drafter_config,
    lowest_ids,
    parameters_per_token,
)
from draftkeep.store.models.fingerprint import tokenizer_fingerprint
from draftkeep.store.models.manifest import (
    MANIFEST_FILE,
    SIGNATURE_FILE,
    Manifest,
    decode_manifest,
)
from draftkeep.store.models.servable import check_servable, read_config
from draftkeep.store.models.target import TargetModel

VOCAB_TENSOR = "draftkeep.vocab_ids"
_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """A small causal LM that proposes tokens of a target's vocabulary.

    `model` is a transformers model whose input ids are the target's and whose logits cover the D
    ids of `vocab_ids` (int64, ascending): logit column i is the target id vocab_ids[i]. Its
    embeddings are frozen. `digest` is 32 bytes, empty while it was never saved. `tokenizer_dir`
    holds the tokenizer files that are saved with it.
    """

    model: Any
    vocab_ids: Tensor
    digest: bytes
    manifest: Manifest
    tokenizer_dir: Path

    def lookup_V(self) -> Tensor:
        """int64 of length V: target id to drafter index, -1 for ids it cannot propose."""
        lookup_V = torch.full((int(self.model.config.vocab_size),), -1, dtype=torch.int64)
        lookup_V[self.vocab_ids] = torch.arange(len(self.vocab_ids))
        return lookup_V


def cold_drafter(
    target: TargetModel, *, layers: int, vocab: int, share_embeddings: bool = False
) -> Drafter:
    """A drafter made of the target's first layers, untrained, over its special and lowest ids.

    Everything is copied, except the embeddings where `share_embeddings`: then both models read one
    tensor, which neither may change. Raises ModelError for a count the target does not have.
    """
    if vocab < 1:
        raise ModelError(f"a drafter vocabulary of {vocab} ids was asked for; give at least 1")
    check_family(target.model)
    keep = (*target.eos_ids, *target.tokenizer.all_special_ids)
    vocab_ids_D = lowest_ids(target.model, vocab=vocab, keep=keep)
    embedding_VC = target.model.model.embed_tokens.weight.detach()
    model = build_network(
        drafter_config(target.model.config, layers=layers),
        embedding_VC=embedding_VC if share_embeddings else embedding_VC.clone(),
        head_DC=target.model.get_output_embeddings().weight.detach()[vocab_ids_D],
    )
    copy_first_layers(target.model, model)
    manifest = Manifest(
        target=target.target_fingerprint.hex(),
        tokenizer=target.tokenizer_fingerprint.hex(),
        layers=layers,
        vocab=len(vocab_ids_D),
    )
    return Drafter(
        model=model,
        vocab_ids=vocab_ids_D,
        digest=b"",
        manifest=manifest,
        tokenizer_dir=target.directory,
    )


def with_vocab(drafter: Drafter, target: TargetModel, vocab_ids: Tensor) -> Drafter:
    """The same body over another vocabulary: head rows of shared ids kept, others the target's.

    `vocab_ids` is int64, distinct and ascending. The body is shared with `drafter`, so the caller
    uses one of the two. The result counts as never saved.
    """
    total = int(drafter.model.config.vocab_size)
    check_vocab_ids(vocab_ids, total=total)
    index_D = drafter.lookup_V()[vocab_ids]
    head_DC = target.model.get_output_embeddings().weight.detach()[vocab_ids].clone()
    shared_D = index_D >= 0
    head_DC[shared_D] = drafter.model.lm_head.weight.detach()[index_D[shared_D]].to(head_DC.dtype)
    model = build_network(
        drafter.model.config,
        embedding_VC=drafter.model.model.embed_tokens.weight.detach(),
        head_DC=head_DC,
    )
    model.model.layers, model.model.norm = drafter.model.model.layers, drafter.model.model.norm
    manifest = replace(drafter.manifest, vocab=len(vocab_ids))
    return replace(drafter, model=model, vocab_ids=vocab_ids.clone(), digest=b"", manifest=manifest)


def cost_ratio(drafter: Drafter, target: TargetModel) -> float:
    """Parameters multiplied for one drafted token, over those for one token of the target."""
    return parameters_per_token(drafter.model) / parameters_per_token(target.model)


def save_drafter(
    drafter: Drafter,
    drafters_dir: Path,
    *,
    created_s: int,
    parent: bytes | None = None,
    lineage: Mapping[str, int] | None = None,
    measures: Mapping[str, float] | None = None,
) -> bytes:
    """Write an unsigned drafter to `drafters_dir`/<hex digest> and return the digest (32 bytes).

    The directory appears whole or not at all and is never changed afterwards, except that
    `sign_drafter` adds the signature. Saving the same content again writes nothing.
    """
    manifest = replace(
        drafter.manifest,
        created_s=created_s,
        parent=parent.hex() if parent else None,
        lineage=dict(lineage or {}),
        measures=dict(measures or {}),
    )
    files = {
        CONFIG_FILE: drafter.model.config.to_json_string(use_diff=False).encode(),
        WEIGHTS_FILE: _pack(drafter),
        MANIFEST_FILE: manifest.encode(),
    }
    for name in TOKENIZER_FILES:
        path = drafter.tokenizer_dir / name
        if path.is_file():
            files[name] = path.read_bytes()
    return write_files(drafters_dir, files)


def load_drafter(
    directory: Path,
    *,
    gate_public: bytes | None,
    expect_tokenizer: bytes | None = None,
    expect_vocab: int | None = None,
    share_embeddings: Tensor | None = None,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Drafter:
    """Verify and load a drafter directory. What is verified are the very bytes that are loaded.

    Checks, in this order: only known files, the digest against the directory's name, the gate's
    signature (`gate_public` None leaves it out: for a job that loads its own work), the manifest,
    the tokenizer's fingerprint, config, tensor names, shapes, dtype and finite values.
    `expect_vocab` is V. The model is put on `device` (None: the CPU) in `dtype` (None: the one it
    was saved in); `vocab_ids` stays on the CPU. Where `share_embeddings` (V, C) lies there in that
    dtype and equals the stored embeddings it is used in their place, and must not be changed.
    Raises ModelError with the reason; nothing is loaded through pickle.
    """
    digest, files = read_verified(directory)
    if gate_public is not None:
        check_signature(files.get(SIGNATURE_FILE, b""), digest, gate_public)
    manifest = decode_manifest(need(files, MANIFEST_FILE))
    _check_tokenizer(manifest, files, expect_tokenizer)
    model, vocab_ids_D = _unpack(
        files, manifest, share_embeddings, device=device or torch.device("cpu"), dtype=dtype
    )
    total = int(model.config.vocab_size)
    if expect_vocab is not None and total != expect_vocab:
        raise ModelError(
            f"drafter {digest.hex()[:12]} takes {total} token ids, the target has {expect_vocab}"
        )
    return Drafter(
        model=model,
        vocab_ids=vocab_ids_D,
        digest=digest,
        manifest=manifest,
        tokenizer_dir=directory,
    )


def _check_tokenizer(
    manifest: Manifest, files: Mapping[str, bytes], expected: bytes | None
) -> None:
    found = tokenizer_fingerprint(need(files, "tokenizer.json"))
    if found.hex() != manifest.tokenizer:
        raise ModelError("the drafter's tokenizer.json is not the one its manifest names")
    if expected is not None and found != expected:
        raise ModelError(
            f"the drafter's tokenizer {found.hex()[:12]} is not the target's "
            f"{expected.hex()[:12]}; train a drafter from this target"
        )


def _pack(drafter: Drafter) -> bytes:
    tensors = {
        name: tensor.detach().cpu().contiguous()
        for name, tensor in drafter.model.state_dict().items()
    }
    tensors[VOCAB_TENSOR] = drafter.vocab_ids.to(torch.int32).contiguous()
    return bytes(safetensors.torch.save(tensors, metadata={"format": "pt"}))


def _unpack(
    files: Mapping[str, bytes],
    manifest: Manifest,
    share_embeddings: Tensor | None,
    *,
    device: torch.device,
    dtype: torch.dtype | None,
) -> tuple[Any, Tensor]:
    try:
        tensors = safetensors.torch.load(need(files, WEIGHTS_FILE))
        values = json.loads(need(files, CONFIG_FILE))
    except (SafetensorError, ValueError) as error:
        raise ModelError(f"the drafter's files cannot be read ({type(error).__name__})") from None
    missing = [name for name in (VOCAB_TENSOR, _EMBEDDING, _HEAD) if name not in tensors]
    if missing or not isinstance(values, dict):
        raise ModelError(f"the drafter lacks the tensor {', '.join(missing) or 'of its config'}")
    config = read_config(values, where="the drafter")
    check_servable(config, where="the drafter")
    vocab_ids_D = tensors.pop(VOCAB_TENSOR).to(torch.int64)
    check_vocab_ids(vocab_ids_D, total=int(config.vocab_size))
    _check_shapes(tensors, config, vocab_ids_D, manifest)
    if dtype is not None:
        tensors = {name: _converted(name, tensor, dtype) for name, tensor in tensors.items()}
    embedding_VC = tensors.pop(_EMBEDDING)
    if share_embeddings is not None and _same(share_embeddings, embedding_VC, device):
        embedding_VC = share_embeddings.detach()
    model = build_network(config, embedding_VC=embedding_VC, head_DC=tensors.pop(_HEAD))
    _fill(model, tensors)
    return model.to(device), vocab_ids_D


def _converted(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    converted = tensor.to(dtype)
    if not bool(torch.isfinite(converted).all()):
        raise ModelError(
            f"{name} holds values too large for {dtype}; serve this drafter with a dtype of wider "
            "range, bfloat16 or float32"
        )
    return converted


def _same(shared_VC: Tensor, stored_VC: Tensor, device: torch.device) -> bool:
    """Whether the shared tensor can stand for the stored one on that device."""
    if shared_VC.device != device or shared_VC.dtype != stored_VC.dtype:
        return False
    return torch.equal(shared_VC.cpu(), stored_VC)


def _check_shapes(
    tensors: Mapping[str, Tensor], config: Any, vocab_ids_D: Tensor, manifest: Manifest
) -> None:
    hidden = int(config.hidden_size)
    wanted = {
        _EMBEDDING: (int(config.vocab_size), hidden),
        _HEAD: (len(vocab_ids_D), hidden),
    }
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise ModelError(f"{name} has shape {tuple(tensors[name].shape)}, expected {shape}")
    if (manifest.layers, manifest.vocab) != (int(config.num_hidden_layers), len(vocab_ids_D)):
        raise ModelError("the drafter's manifest states other layers or vocabulary than its files")
    dtype = tensors[_EMBEDDING].dtype
    for name, tensor in tensors.items():
        if tensor.dtype != dtype or not tensor.is_floating_point():
            raise ModelError(f"{name} is {tensor.dtype}, expected one floating type for all")
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError(f"{name} holds values that are not finite numbers; train it again")


def _fill(model: Any, tensors: Mapping[str, Tensor]) -> None:
    expected = {
        name: tuple(tensor.shape)
        for name, tensor in model.state_dict().items()
        if name not in (_EMBEDDING, _HEAD)
    }
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if found != expected:
        odd = sorted(set(found.items()) ^ set(expected.items()))[0][0]
        raise ModelError(f"the drafter's tensors do not fit its config, {odd} first")
    model.load_state_dict(dict(tensors), strict=False)
