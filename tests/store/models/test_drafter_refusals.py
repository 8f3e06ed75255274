"""Drafter directories that were altered, forged or never right: none of them is loaded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftkeep.errors import ModelError
from draftkeep.policies.signing import SigningKey
from draftkeep.store.models import tiny
from draftkeep.store.models.drafter import VOCAB_TENSOR, cold_drafter, load_drafter, save_drafter
from draftkeep.store.models.drafter_files import read_verified, sign_drafter, write_files
from draftkeep.store.models.target import load_target

GATE = SigningKey(b"g" * 32)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a signed drafter of the toy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "_STEPS", 3)
        patch.setattr(tiny, "_DIALOGUES", 200)
        target = load_target("tiny", cache_dir=tmp_path_factory.mktemp("cache"))
    drafters_dir = tmp_path_factory.mktemp("drafters")
    drafter = cold_drafter(target, layers=2, vocab=300)
    directory = drafters_dir / save_drafter(drafter, drafters_dir, created_s=5).hex()
    sign_drafter(directory, GATE.sign)
    return directory


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    """A copy to tamper with."""
    return Path(shutil.copytree(original, tmp_path / "drafters" / original.name))


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_tampering_with_any_bit_of_any_file_is_refused(data: st.DataObject, saved: Path) -> None:
    path = saved / data.draw(st.sampled_from(sorted(p.name for p in saved.iterdir())))
    original = path.read_bytes()
    place = data.draw(st.integers(0, len(original) * 8 - 1))
    changed = bytearray(original)
    changed[place // 8] ^= 1 << (place % 8)
    path.write_bytes(changed)
    try:
        with pytest.raises(ModelError):
            load_drafter(saved, gate_public=GATE.public)
    finally:
        path.write_bytes(original)


@pytest.mark.parametrize(
    "change",
    ["renamed", "pickle", "removed", "symlink", "directory", "unsigned", "other gate", "gone"],
)
def test_tampering_with_the_directory_is_refused(change: str, saved: Path) -> None:
    public = GATE.public
    if change == "renamed":
        saved = saved.rename(saved.with_name("0" * 64))
    elif change == "pickle":
        torch.save({}, saved / "pytorch_model.bin")
    elif change == "removed":
        (saved / "tokenizer_config.json").unlink()
    elif change == "symlink":
        shutil.move(saved / "config.json", saved.parent / "config.json")
        (saved / "config.json").symlink_to(saved.parent / "config.json")
    elif change == "directory":
        (saved / "chat_template.jinja").unlink()
        (saved / "chat_template.jinja").mkdir()
    elif change == "unsigned":
        (saved / "signature").unlink()
    elif change == "other gate":
        public = SigningKey(b"h" * 32).public
    else:
        shutil.rmtree(saved)
    with pytest.raises(ModelError):
        load_drafter(saved, gate_public=public)


def test_a_signature_whose_writer_died_is_no_obstacle(saved: Path) -> None:
    (saved / ".signature.x1").write_bytes(b"half")
    assert load_drafter(saved, gate_public=GATE.public).digest.hex() == saved.name


def test_another_tokenizer_or_vocabulary_is_refused(saved: Path) -> None:
    with pytest.raises(ModelError, match="tokenizer"):
        load_drafter(saved, gate_public=None, expect_tokenizer=b"x" * 32)
    with pytest.raises(ModelError, match="513"):
        load_drafter(saved, gate_public=None, expect_vocab=513)


# Well-hashed content that is wrong inside: what a broken or hostile job could save.
WRONG: dict[str, tuple[str, Callable[[Tensor], Tensor] | None]] = {
    "nan": ("lm_head.weight", lambda x: x.index_fill(0, torch.tensor([3]), float("nan"))),
    "inf": ("model.norm.weight", lambda x: x * float("inf")),
    "head rows": ("lm_head.weight", lambda x: x[:-1]),
    "head width": ("lm_head.weight", lambda x: x[:, :-1]),
    "embedding rows": ("model.embed_tokens.weight", lambda x: x[:-1]),
    "layer shape": ("model.layers.0.mlp.up_proj.weight", lambda x: x.T),
    "dtype": ("model.norm.weight", lambda x: x.half()),
    "integers": ("model.norm.weight", lambda x: x.to(torch.int32)),
    "unordered ids": (VOCAB_TENSOR, lambda x: x.flip(0)),
    "ids past the end": (VOCAB_TENSOR, lambda x: x + 400),
    "negative ids": (VOCAB_TENSOR, lambda x: x - 1),
    "table of ids": (VOCAB_TENSOR, lambda x: x.reshape(-1, 2)),
    "missing": ("model.layers.1.input_layernorm.weight", None),
    "no ids": (VOCAB_TENSOR, None),
    "no head": ("lm_head.weight", None),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors_are_refused(name: str, saved: Path, tmp_path: Path) -> None:
    key, change = WRONG[name]

    def edit(tensors: dict[str, Tensor]) -> None:
        old = tensors.pop(key)
        if change is not None:
            tensors[key] = change(old).contiguous()

    with pytest.raises(ModelError):
        load_drafter(_forged(saved, tmp_path, tensors=edit), gate_public=None)


def test_a_tensor_too_many_is_refused(saved: Path, tmp_path: Path) -> None:
    def edit(tensors: dict[str, Tensor]) -> None:
        tensors["extra"] = torch.zeros(1)

    with pytest.raises(ModelError, match="extra"):
        load_drafter(_forged(saved, tmp_path, tensors=edit), gate_public=None)


@pytest.mark.parametrize(
    ("file", "changes"),
    [
        ("config.json", {"num_hidden_layers": 1}),
        ("config.json", {"vocab_size": 600}),
        ("config.json", {"sliding_window": 8}),
        ("config.json", {"auto_map": {}}),
        ("config.json", {"model_type": "mamba"}),
        ("draftkeep.json", {"format": 2}),
        ("draftkeep.json", {"layers": 3}),
        ("draftkeep.json", {"vocab": "300"}),
        ("draftkeep.json", {"lineage": []}),
        ("draftkeep.json", {"measures": {"rate": "high"}}),
        ("draftkeep.json", {"tokenizer": "0" * 64}),
        ("draftkeep.json", {"parent": "not a digest"}),
        ("draftkeep.json", {"extra": 1}),
    ],
)
def test_a_wrong_config_or_manifest_is_refused(
    file: str, changes: dict[str, Any], saved: Path, tmp_path: Path
) -> None:
    def edit(values: dict[str, Any]) -> None:
        values.update(changes)

    with pytest.raises(ModelError):
        load_drafter(_forged(saved, tmp_path, file=file, values=edit), gate_public=None)


@pytest.mark.parametrize(
    "file", ["config.json", "draftkeep.json", "model.safetensors", "tokenizer.json"]
)
@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\x00", b"null"])
def test_noise_in_place_of_a_file_is_refused(
    file: str, content: bytes, saved: Path, tmp_path: Path
) -> None:
    _, files = read_verified(saved)
    digest = write_files(tmp_path / "forged", {**files, file: content})
    with pytest.raises(ModelError):
        load_drafter(tmp_path / "forged" / digest.hex(), gate_public=None)


def _forged(
    saved: Path,
    tmp_path: Path,
    *,
    tensors: Any = None,
    file: str = "config.json",
    values: Any = None,
) -> Path:
    """The saved drafter with its content edited and its digest made right again."""
    _, files = read_verified(saved)
    if tensors is not None:
        loaded = safetensors.torch.load(files["model.safetensors"])
        tensors(loaded)
        files["model.safetensors"] = safetensors.torch.save(loaded)
    if values is not None:
        content = json.loads(files[file])
        values(content)
        files[file] = json.dumps(content).encode()
    digest = write_files(tmp_path / "forged", files)
    return tmp_path / "forged" / digest.hex()
