"""Fingerprints, against a second implementation of their definition."""

import hashlib
import json
import os
import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from draftkeep.errors import ModelError
from draftkeep.store.models import fingerprint
from draftkeep.store.models.fingerprint import (
    fingerprints,
    target_fingerprint,
    tokenizer_fingerprint,
)

TOKENIZER: dict[str, Any] = {
    "version": "1.0",
    "added_tokens": [
        {"id": 3, "content": "<b>", "special": True},
        {"id": 1, "content": "<a>", "special": True},
    ],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": None,
    "decoder": {"type": "ByteLevel"},
    "model": {"type": "BPE", "vocab": {"x": 0, "é": 2}, "merges": [["x", "é"], ["é", "x"]]},
}
TENSORS = {"b.weight": torch.arange(6.0).reshape(2, 3), "a": torch.tensor([1, 2], dtype=torch.int8)}
CONFIG = {"model_type": "llama", "hidden_size": 8, "transformers_version": "1", "_name": "x"}


def test_the_tokenizer_fingerprint_is_as_defined() -> None:
    text = (
        b'{"added_tokens":[{"content":"<a>","id":1,"special":true},'
        b'{"content":"<b>","id":3,"special":true}],"merges":[["x","\\u00e9"],["\\u00e9","x"]],'
        b'"normalizer":{"type":"NFC"},"pre_tokenizer":null,"vocab":{"x":0,"\\u00e9":2}}'
    )
    expected = hashlib.sha256(b"draftkeep/v1/tokenizer" + struct.pack(">I", len(text)) + text)
    assert tokenizer_fingerprint(_tokenizer()) == expected.digest()


def test_the_target_fingerprint_is_as_defined(tmp_path: Path) -> None:
    _model(tmp_path)
    config = b'{"hidden_size":8,"model_type":"llama"}'
    parts = [b"draftkeep/v1/target", struct.pack(">I", len(config)), config]
    for name, dtype, tensor in (
        ("a", b"I8", TENSORS["a"]),
        ("b.weight", b"F32", TENSORS["b.weight"]),
    ):
        data = tensor.numpy().tobytes()
        shape = b"".join(struct.pack(">Q", size) for size in tensor.shape)
        for field in (name.encode(), dtype, shape):
            parts += [struct.pack(">I", len(field)), field]
        parts += [struct.pack(">Q", len(data)), data]
    parts += [struct.pack(">I", 32), b"t" * 32]
    assert target_fingerprint(tmp_path, b"t" * 32) == hashlib.sha256(b"".join(parts)).digest()


def test_golden(tmp_path: Path) -> None:
    _model(tmp_path)
    found = fingerprints(tmp_path, cache_dir=tmp_path / "cache")
    assert (
        found.tokenizer.hex() == "0e312587702a6b7665d24b7a05a89043476d132c92b86ff10671e6fc546a6e7a"
    )
    assert found.target.hex() == "3793937f9061e046e214dd055f5462b799b5ea06c737560d025c802a5511e5e5"


def test_how_tensors_are_spread_over_files_does_not_matter(tmp_path: Path) -> None:
    for name, split in (("one", False), ("two", True)):
        (tmp_path / name).mkdir()
        _model(tmp_path / name, split=split)
    marks = [fingerprints(tmp_path / name, cache_dir=tmp_path / "cache") for name in ("one", "two")]
    assert marks[0] == marks[1]


@pytest.mark.parametrize("what", ["value", "dtype", "shape", "name", "config", "tokenizer"])
def test_every_part_counts(what: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    _model(tmp_path / "a")
    tensors, config, tokenizer = dict(TENSORS), dict(CONFIG), _tokenizer()
    if what == "value":
        tensors["a"] = tensors["a"] + 1
    elif what == "dtype":
        tensors["a"] = tensors["a"].to(torch.uint8)
    elif what == "shape":
        tensors["b.weight"] = tensors["b.weight"].reshape(3, 2)
    elif what == "name":
        tensors["c"] = tensors.pop("b.weight")
    elif what == "config":
        config["hidden_size"] = 9
    else:
        tokenizer = _tokenizer(normalizer=None)
    _model(tmp_path / "b", tensors=tensors, config=config, tokenizer=tokenizer)
    one, other = (fingerprints(tmp_path / name, cache_dir=tmp_path / "c").target for name in "ab")
    assert one != other


def test_what_saving_again_changes_does_not_count(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    _model(tmp_path / "a")
    _model(tmp_path / "b", config={**CONFIG, "transformers_version": "9", "_name": "elsewhere"})
    one, other = (fingerprints(tmp_path / name, cache_dir=tmp_path / "c") for name in "ab")
    assert one == other


def test_computed_once_and_again_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _model(tmp_path)
    cache = tmp_path / "cache"
    first = fingerprints(tmp_path, cache_dir=cache)
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "target_fingerprint", None)
        assert fingerprints(tmp_path, cache_dir=cache) == first
    _model(tmp_path, tensors={**TENSORS, "a": TENSORS["a"] + 1})
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))  # whatever the clock's grain
    assert fingerprints(tmp_path, cache_dir=cache).target != first.target


def test_a_damaged_memory_is_computed_anew(tmp_path: Path) -> None:
    _model(tmp_path)
    cache = tmp_path / "cache"
    first = fingerprints(tmp_path, cache_dir=cache)
    (memory,) = (cache / "fingerprints").iterdir()
    memory.write_bytes(memory.read_bytes()[:-20])
    assert fingerprints(tmp_path, cache_dir=cache) == first


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["gone", "cut", "noise"])
def test_damaged_files_are_a_clear_error(name: str, damage: str, tmp_path: Path) -> None:
    _model(tmp_path)
    path = tmp_path / name
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-3])
    else:
        path.write_bytes(b"\xff\xfe not what it should be")
    with pytest.raises(ModelError):
        fingerprints(tmp_path, cache_dir=tmp_path / "cache")


@given(
    words=st.lists(st.text("abcé", min_size=1, max_size=3), min_size=2, max_size=6, unique=True),
    data=st.data(),
)
def test_spelling_of_merges_and_order_of_keys_do_not_count(
    words: list[str], data: st.DataObject
) -> None:
    pairs = [[left, right] for left, right in pairwise(words)]
    vocab = {word: index for index, word in enumerate(words)}
    shuffled = {word: vocab[word] for word in data.draw(st.permutations(words))}
    as_pairs = _tokenizer(model={"vocab": vocab, "merges": pairs})
    as_text = _tokenizer(
        model={"merges": [" ".join(pair) for pair in pairs], "vocab": shuffled, "type": "BPE"}
    )
    assert tokenizer_fingerprint(as_pairs) == tokenizer_fingerprint(as_text)
    other = _tokenizer(model={"vocab": vocab, "merges": pairs[::-1][:-1]})
    assert tokenizer_fingerprint(as_pairs) != tokenizer_fingerprint(other)


def _tokenizer(**changes: Any) -> bytes:
    return json.dumps({**TOKENIZER, **changes}).encode()


def _model(
    directory: Path,
    *,
    tensors: dict[str, torch.Tensor] = TENSORS,
    config: dict[str, Any] = CONFIG,
    tokenizer: bytes = _tokenizer(),
    split: bool = False,
) -> None:
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_bytes(tokenizer)
    if split:
        for index, (name, tensor) in enumerate(tensors.items()):
            save_file({name: tensor}, directory / f"model-{index}.safetensors")
    else:
        save_file(tensors, directory / "model.safetensors")
