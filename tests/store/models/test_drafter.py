"""Drafters: what is cut, kept, written and refused.

Shapes: B rows, T positions, V target vocabulary, D drafter vocabulary.
"""

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from draftkeep.errors import ModelError
from draftkeep.policies.signing import SigningKey
from draftkeep.store.models import tiny
from draftkeep.store.models.drafter import (
    Drafter,
    cold_drafter,
    cost_ratio,
    load_drafter,
    save_drafter,
    with_vocab,
)
from draftkeep.store.models.drafter_export import export_full_vocab
from draftkeep.store.models.drafter_files import sign_drafter
from draftkeep.store.models.drafter_network import drafter_config, lowest_ids, parameters_per_token
from draftkeep.store.models.manifest import Manifest, decode_manifest
from draftkeep.store.models.target import TargetModel, load_target

VOCAB = 300
GATE = SigningKey(b"g" * 32)
IDS_BT = torch.tensor([[1, 40, 300, 511, 7, 2]])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TargetModel]:
    """The toy after a few steps of growth: real files, built in a moment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny, "_STEPS", 3)
        patch.setattr(tiny, "_DIALOGUES", 200)
        yield load_target("tiny", cache_dir=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def drafter(target: TargetModel) -> Drafter:
    return cold_drafter(target, layers=2, vocab=VOCAB)


@pytest.fixture
def saved(drafter: Drafter, tmp_path: Path) -> Path:
    """A saved and signed drafter's directory."""
    digest = save_drafter(drafter, tmp_path / "drafters", created_s=5, measures={"rate": 0.5})
    directory = tmp_path / "drafters" / digest.hex()
    sign_drafter(directory, GATE.sign)
    return directory


def test_a_cold_drafter_is_the_target_read_early(target: TargetModel, drafter: Drafter) -> None:
    with torch.inference_mode():
        hidden_BTC = target.model(IDS_BT, output_hidden_states=True).hidden_states[2]
        expected = target.model.lm_head(target.model.model.norm(hidden_BTC))[..., drafter.vocab_ids]
        torch.testing.assert_close(drafter.model(IDS_BT).logits, expected)


def test_the_vocabulary_holds_every_ending_and_the_lowest_ids(target: TargetModel) -> None:
    ids = cold_drafter(target, layers=1, vocab=20).vocab_ids
    assert ids.tolist() == list(range(20))
    assert lowest_ids(target.model, vocab=4, keep=(500, 2)).tolist() == [0, 1, 2, 500]
    assert len(cold_drafter(target, layers=1, vocab=9999).vocab_ids) == target.vocab


def test_lookup_is_the_inverse_of_the_vocabulary(drafter: Drafter) -> None:
    lookup_V = drafter.lookup_V()
    assert torch.equal(lookup_V[drafter.vocab_ids], torch.arange(VOCAB))
    assert int((lookup_V >= 0).sum()) == VOCAB


def test_training_a_drafter_leaves_the_target_alone(target: TargetModel) -> None:
    before = target.model(IDS_BT).logits.clone()
    own = cold_drafter(target, layers=2, vocab=VOCAB, share_embeddings=True)
    trainable = [p for p in own.model.parameters() if p.requires_grad]
    own.model(IDS_BT).logits.square().sum().backward()
    torch.optim.SGD(trainable, lr=1.0).step()
    assert torch.equal(target.model(IDS_BT).logits, before)
    assert own.model.model.embed_tokens.weight.grad is None
    assert all(p.grad is not None for p in trainable)


@pytest.mark.parametrize(("layers", "vocab"), [(0, 20), (5, 20), (2, 0)])
def test_an_impossible_cut_is_refused(layers: int, vocab: int, target: TargetModel) -> None:
    with pytest.raises(ModelError):
        cold_drafter(target, layers=layers, vocab=vocab)


def test_another_vocabulary_keeps_what_was_learned(target: TargetModel) -> None:
    own = cold_drafter(target, layers=2, vocab=VOCAB)
    with torch.no_grad():
        own.model.lm_head.weight.add_(1.0)
    wanted = torch.tensor([2, 10, 299, 300, 511])
    other = with_vocab(own, target, wanted)
    head_VC = target.model.lm_head.weight
    assert torch.equal(other.model.lm_head.weight[:3], own.model.lm_head.weight[wanted[:3]])
    assert torch.equal(other.model.lm_head.weight[3:], head_VC[wanted[3:]])
    with torch.inference_mode():
        assert torch.equal(
            other.model(IDS_BT).logits[..., :3], own.model(IDS_BT).logits[..., wanted[:3]]
        )
    assert other.manifest.vocab == 5
    assert other.digest == b""


@pytest.mark.parametrize("ids", [[], [3, 2], [2, 2], [-1, 4], [4, 512]])
def test_an_odd_vocabulary_is_refused(
    ids: list[int], drafter: Drafter, target: TargetModel
) -> None:
    with pytest.raises(ModelError, match="vocabulary"):
        with_vocab(drafter, target, torch.tensor(ids, dtype=torch.int64))


def test_the_packaged_target_gets_a_cheap_drafter() -> None:
    """SmolLM2-135M by arithmetic: 2 layers and 8,192 ids cost at most 0.15 of the target."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        whole = LlamaForCausalLM(config)
        small_config: Any = drafter_config(config, layers=2)
        small_config.vocab_size = 8192
        small = LlamaForCausalLM(small_config)
    layer = 576 * (576 + 192 + 192 + 576) + 3 * 576 * 1536 + 2 * 576
    assert parameters_per_token(whole) == 30 * layer + 576 + 49152 * 576
    assert parameters_per_token(small) == 2 * layer + 576 + 8192 * 576
    assert parameters_per_token(small) / parameters_per_token(whole) <= 0.15


def test_cost_ratio_counts_layers_and_head(target: TargetModel) -> None:
    few = cost_ratio(cold_drafter(target, layers=1, vocab=50), target)
    assert few < cost_ratio(cold_drafter(target, layers=1, vocab=500), target)
    assert few < cost_ratio(cold_drafter(target, layers=2, vocab=50), target)


def test_what_is_saved_is_what_is_loaded(
    saved: Path, drafter: Drafter, target: TargetModel
) -> None:
    loaded = load_drafter(
        saved,
        gate_public=GATE.public,
        expect_tokenizer=target.tokenizer_fingerprint,
        expect_vocab=target.vocab,
    )
    with torch.inference_mode():
        assert torch.equal(loaded.model(IDS_BT).logits, drafter.model(IDS_BT).logits)
    assert torch.equal(loaded.vocab_ids, drafter.vocab_ids)
    assert loaded.digest.hex() == saved.name
    assert loaded.manifest.measures == {"rate": 0.5}
    assert loaded.manifest.target == target.target_fingerprint.hex()
    frozen = [name for name, p in loaded.model.named_parameters() if not p.requires_grad]
    assert frozen == ["model.embed_tokens.weight"]
    assert not loaded.model.training


def test_a_loaded_drafter_saves_to_the_same_weights(saved: Path, tmp_path: Path) -> None:
    loaded = load_drafter(saved, gate_public=None)
    again = save_drafter(loaded, tmp_path / "again", created_s=5, measures={"rate": 0.5})
    assert again.hex() == saved.name


def test_saving_twice_writes_once(drafter: Drafter, tmp_path: Path) -> None:
    first = save_drafter(drafter, tmp_path, created_s=5)
    stamp = (tmp_path / first.hex() / "model.safetensors").stat()
    assert save_drafter(drafter, tmp_path, created_s=5) == first
    assert (tmp_path / first.hex() / "model.safetensors").stat() == stamp
    assert [path.name for path in tmp_path.iterdir()] == [first.hex()]


def test_no_path_of_the_machine_is_written(saved: Path, target: TargetModel) -> None:
    for path in saved.iterdir():
        assert str(target.directory.parent).encode() not in path.read_bytes()


def test_embeddings_are_shared_only_where_they_are_the_same(
    saved: Path, target: TargetModel
) -> None:
    embedding = target.model.model.embed_tokens.weight
    shared = load_drafter(saved, gate_public=None, share_embeddings=embedding)
    assert shared.model.model.embed_tokens.weight.data_ptr() == embedding.data_ptr()
    other = load_drafter(saved, gate_public=None, share_embeddings=embedding + 1)
    assert torch.equal(other.model.model.embed_tokens.weight, embedding)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_drafter_comes_in_the_dtype_asked_for(
    saved: Path, target: TargetModel, dtype: torch.dtype
) -> None:
    embedding = target.model.model.embed_tokens.weight.to(dtype)
    for shared in (None, embedding, embedding + 1, embedding.double()):
        loaded = load_drafter(saved, gate_public=None, share_embeddings=shared, dtype=dtype)
        assert {weight.dtype for weight in loaded.model.parameters()} == {dtype}
        mine = loaded.model.model.embed_tokens.weight
        assert torch.equal(mine, embedding)
        assert (mine.data_ptr() == embedding.data_ptr()) == (shared is embedding)
        with torch.inference_mode():
            assert bool(torch.isfinite(loaded.model(IDS_BT).logits).all())


def test_embeddings_on_another_device_are_not_shared(saved: Path, target: TargetModel) -> None:
    elsewhere = target.model.model.embed_tokens.weight.to("meta")
    loaded = load_drafter(saved, gate_public=None, share_embeddings=elsewhere)
    assert {weight.device.type for weight in loaded.model.parameters()} == {"cpu"}


def test_a_drafter_goes_to_the_device_asked_for(saved: Path) -> None:
    loaded = load_drafter(saved, gate_public=None, device=torch.device("meta"))
    assert {weight.device.type for weight in loaded.model.parameters()} == {"meta"}
    assert loaded.vocab_ids.device.type == "cpu"


def test_values_too_large_for_the_dtype_are_refused(drafter: Drafter, tmp_path: Path) -> None:
    model = copy.deepcopy(drafter.model)
    with torch.no_grad():
        model.lm_head.weight[3, 4] = 1e30
    digest = save_drafter(dataclasses.replace(drafter, model=model), tmp_path, created_s=5)
    load_drafter(tmp_path / digest.hex(), gate_public=None, dtype=torch.bfloat16)
    with pytest.raises(ModelError, match=r"too large for torch\.float16"):
        load_drafter(tmp_path / digest.hex(), gate_public=None, dtype=torch.float16)


@given(
    layers=st.integers(1, 9),
    vocab=st.integers(1, 10**6),
    created_s=st.integers(0, 2**40),
    parent=st.none() | st.binary(min_size=32, max_size=32).map(bytes.hex),
    lineage=st.dictionaries(st.text(max_size=8), st.integers(0, 2**40), max_size=3),
    measures=st.dictionaries(st.text(max_size=8), st.floats(allow_nan=False, allow_infinity=False)),
)
def test_manifests_come_back_as_they_were(**values: Any) -> None:
    manifest = Manifest(target="a" * 64, tokenizer="b" * 64, **values)
    assert decode_manifest(manifest.encode()) == manifest


def test_an_export_loads_in_transformers_and_proposes_the_same(
    drafter: Drafter, tmp_path: Path
) -> None:
    export_full_vocab(drafter, tmp_path / "full")
    maker: Any = AutoModelForCausalLM
    full, report = maker.from_pretrained(
        tmp_path / "full", output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    ids_BT = torch.randint(0, 512, (4, 50), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        mine, exported = drafter.model(ids_BT).logits, full(ids_BT).logits
    assert exported.shape[-1] == 512
    torch.testing.assert_close(exported[..., drafter.vocab_ids], mine)
    assert torch.equal(exported.argmax(-1), drafter.vocab_ids[mine.argmax(-1)])


def test_an_export_replaces_nothing(drafter: Drafter, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="exists"):
        export_full_vocab(drafter, tmp_path)


def test_a_model_built_otherwise_is_refused(target: TargetModel) -> None:
    odd = dataclasses.replace(target, model=target.model.model)
    with pytest.raises(ModelError, match="LlamaModel"):
        cold_drafter(odd, layers=1, vocab=20)
