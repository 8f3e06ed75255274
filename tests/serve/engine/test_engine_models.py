"""Families of decoders are served as transformers generates; others are refused with the reason."""

import copy
from typing import Any

import pytest
import torch
import transformers as tr

from draftkeep.errors import ModelError
from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine.drafting import DraftModel
from draftkeep.serve.engine.engine import Engine
from draftkeep.serve.engine.lookahead import Speculation
from tests.serve.lab import NEAR_TIE, generated

VOCAB, TOKENS, LENGTHS = 61, 12, (1, 9, 30, 4, 17)
# Untyped in transformers.
CAUSAL: Any = tr.AutoModelForCausalLM
SEQ2SEQ: Any = tr.AutoModelForSeq2SeqLM
TINY: Any = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GROUPED: Any = TINY | {"num_key_value_heads": 2}
GPT2: Any = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 96,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "attn_pdrop": 0.0,
}
SERVED: Any = {
    "Llama": lambda: tr.LlamaConfig(**GROUPED),
    "Llama, tied, one key head": lambda: tr.LlamaConfig(
        **TINY | {"num_key_value_heads": 1, "tie_word_embeddings": True}
    ),
    "Llama, scaled rotation": lambda: tr.LlamaConfig(
        **GROUPED,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    ),
    "Llama, wide heads, biases": lambda: tr.LlamaConfig(
        **GROUPED, head_dim=16, attention_bias=True, mlp_bias=True
    ),
    "Qwen2": lambda: tr.Qwen2Config(**GROUPED, use_sliding_window=False),
    "Qwen3": lambda: tr.Qwen3Config(**GROUPED, head_dim=16, use_sliding_window=False),
    "GPT-2": lambda: tr.GPT2Config(**GPT2),
    "Mistral, full attention": lambda: tr.MistralConfig(**GROUPED, sliding_window=None),
}


def _model(config: Any, seed: int = 0) -> Any:
    """A seeded model whose biases and norms are random too, so that none can be left out."""
    torch.manual_seed(seed)
    model: Any = CAUSAL.from_config(config, attn_implementation="sdpa")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 1:
                weight.add_(torch.randn_like(weight), alpha=0.2)
            assert torch.isfinite(weight).all(), name
    return model.eval()


def _engine(model: Any, *, slots: Any = 3, **options: Any) -> Any:
    return Engine(
        model,
        slots=slots,
        max_context=80,
        speculation=Speculation(mode="fixed", lookahead=3),
        capture_k=0,
        on_finish=lambda _: None,
        packing="never",
        **options,
    )


def _assert_same(model: Any, reply: Any, expected: Any) -> None:
    got = reply.tokens
    assert len(got) == len(expected)
    if got == expected:
        return
    at = next(i for i in range(len(got)) if got[i] != expected[i])
    with torch.inference_mode():
        ids = torch.tensor([[*reply.request.prompt_ids, *got[:at]]])
        best = model(input_ids=ids, use_cache=False).logits[0, -1].topk(2)
    assert {got[at], expected[at]} == set(best.indices.tolist())
    assert float(best.values[0] - best.values[1]) < NEAR_TIE


@pytest.fixture(scope="module", params=sorted(SERVED))
def family(request: Any, lab: Any) -> Any:
    """A model of the family, a drafter near it, and what transformers makes of the prompts."""
    model = _model(SERVED[request.param]())
    near = copy.deepcopy(model)
    with torch.no_grad():
        for weight in near.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.03)
    prompts = lab.prompts(LENGTHS, VOCAB)
    expected = [generated(model, prompt, TOKENS) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 8
    return model, near, prompts, expected


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("slots", [1, 3])
def test_a_family_is_served_as_transformers_generates(
    lab: Any, family: Any, drafted: Any, slots: Any
) -> None:
    model, near, prompts, expected = family
    engine = _engine(copy.deepcopy(model), slots=slots)
    if drafted:
        engine.swap(
            DraftModel(
                model=copy.deepcopy(near), vocab_ids=torch.arange(VOCAB), digest=b"near".ljust(32)
            )
        )
    replies = [lab.request(str(i), p, max_tokens=TOKENS) for i, p in enumerate(prompts)]
    lab.run(engine, replies)
    for reply, tokens in zip(replies, expected, strict=True):
        _assert_same(model, reply, tokens)
    stats = engine.stats()
    assert stats.output_tokens == TOKENS * len(prompts)
    if drafted:
        assert 0 < stats.accepted < stats.tested


def test_a_drafter_of_another_family_serves_as_well(lab: Any) -> None:
    """GPT-2 drafts for Llama: the vocabulary is all they share."""
    model = _model(SERVED["Llama"]())
    engine = _engine(copy.deepcopy(model))
    other = _model(SERVED["GPT-2"](), seed=5)
    engine.swap(DraftModel(model=other, vocab_ids=torch.arange(VOCAB), digest=b"o" * 32))
    sampled = Sampling(temperature=1.0)
    prompts = lab.prompts(LENGTHS, VOCAB)
    replies = [
        lab.request(str(i), p, max_tokens=TOKENS, sampling=sampled) for i, p in enumerate(prompts)
    ]
    lab.run(engine, replies)
    alone = [
        lab.request(str(i), p, max_tokens=TOKENS, sampling=sampled) for i, p in enumerate(prompts)
    ]
    expected = lab.run(_engine(copy.deepcopy(model)), alone)
    assert [reply.tokens for reply in replies] == expected
    assert engine.stats().tested > 0


ENCODER_DECODERS: Any = {
    "T5": lambda: tr.T5Config(
        vocab_size=VOCAB, d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4
    ),
    "Bart": lambda: tr.BartConfig(
        vocab_size=VOCAB, d_model=32, encoder_layers=1, decoder_layers=1, decoder_ffn_dim=48
    ),
}
REFUSED: Any = {
    "sliding window": (lambda: tr.MistralConfig(**GROUPED, sliding_window=16), "sliding.?window"),
    "some sliding layers": (
        lambda: tr.Qwen2Config(
            **GROUPED, use_sliding_window=True, sliding_window=16, max_window_layers=1
        ),
        "sliding",
    ),
    "recurrent state": (
        lambda: tr.MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, state_size=4),
        "recurrent",
    ),
    "recurrent layers": (
        lambda: tr.Lfm2Config(**GROUPED, layer_types=["conv", "full_attention"]),
        "recurrent|conv",
    ),
    "soft-capped scores": (
        lambda: tr.Gemma2Config(
            **GROUPED, head_dim=8, layer_types=["full_attention"] * 2, final_logit_softcapping=30.0
        ),
        "final_logit_softcapping",
    ),
    "scaled scores": (lambda: tr.CohereConfig(**GROUPED, logit_scale=0.25), "logit_scale"),
    "divided scores": (lambda: tr.GraniteConfig(**GROUPED, logits_scaling=4.0), "logits_scaling"),
    "no positions": (
        lambda: tr.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=4),
        "position",
    ),
    "a long context": (
        lambda: tr.LlamaConfig(**GROUPED | {"max_position_embeddings": 40}),
        "lower max_context",
    ),
}


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_a_model_that_cannot_be_served_is_refused_with_the_reason(kind: Any) -> None:
    config, reason = REFUSED[kind]
    model: Any = CAUSAL.from_config(config()).eval()
    with pytest.raises(ModelError, match=reason) as refused:
        _engine(model)
    assert type(model).__name__ in str(refused.value)


@pytest.mark.parametrize("kind", sorted(ENCODER_DECODERS))
def test_an_encoder_decoder_is_refused_with_the_reason(kind: Any) -> None:
    model = SEQ2SEQ.from_config(ENCODER_DECODERS[kind]())
    with pytest.raises(ModelError, match="encoder-decoder"):
        _engine(model.eval())


def test_eager_attention_is_refused_with_the_remedy() -> None:
    model: Any = CAUSAL.from_config(SERVED["Llama"](), attn_implementation="eager")
    with pytest.raises(ModelError, match="sdpa"):
        _engine(model.eval())


def test_a_drafter_that_cannot_be_served_is_refused_as_well(lab: Any) -> None:
    engine = _engine(_model(SERVED["Llama"]()))
    config, reason = REFUSED["sliding window"]
    window: Any = CAUSAL.from_config(config()).eval()
    with pytest.raises(ModelError, match=reason):
        engine.swap(DraftModel(model=window, vocab_ids=torch.arange(VOCAB), digest=b"w" * 32))
    assert engine.stats().drafter == b""
