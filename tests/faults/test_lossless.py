"""Class A: with drafts or without, the output is the target's."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine.drafting import DraftModel
from draftkeep.serve.engine.ngram import NgramDrafter
from tests.faults.house import COMPLETIONS, House
from tests.faults.plain import engine_over, plain_output
from tests.serve.lab import generated
from tests.serve.script import Script

VOCAB = 48
GREEDY = Sampling(temperature=0.0)
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _family(name: str) -> PreTrainedModel:
    torch.manual_seed(4)
    model: PreTrainedModel
    if name == "qwen2":
        model = Qwen2ForCausalLM(Qwen2Config(**_SMALL))
    elif name == "mistral":
        model = MistralForCausalLM(MistralConfig(**_SMALL, sliding_window=None))
    else:
        config = GPT2Config(
            vocab_size=VOCAB,
            n_embd=32,
            n_layer=2,
            n_head=4,
            n_positions=160,
            initializer_range=0.25,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = GPT2LMHeadModel(config)
    model.train(False)
    model.set_attn_implementation("sdpa")
    return model


def _noisy(model: PreTrainedModel) -> PreTrainedModel:
    noisy = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for weight in noisy.parameters():
            weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.02)
    return noisy


@pytest.mark.parametrize("family", ["qwen2", "mistral", "gpt2"])
def test_one_model_writes_one_text_with_and_without_drafts(lab: Any, family: str) -> None:
    """mlc-ai/mlc-llm#2167: the same model answered otherwise once speculation was on."""
    model = _family(family)
    prompts = lab.prompts((1, 7, 23))
    expected = [generated(model, prompt, 14) for prompt in prompts]
    ids = torch.arange(VOCAB)
    for drafter in (None, copy.deepcopy(model), _noisy(model)):
        engine = engine_over(model, slots=2)
        if drafter is not None:
            engine.swap(DraftModel(model=drafter, vocab_ids=ids, digest=b"d" * 32))
        replies = [lab.request(str(i), p, max_tokens=14) for i, p in enumerate(prompts)]
        assert lab.run(engine, replies) == expected
        assert (engine.stats().accepted > 0) == (drafter is not None)


def test_the_ratio_test_divides_by_the_law_that_was_drawn_from(lab: Any) -> None:
    """vllm#40149: the sampled draft's law was lost, and one-hot stood in for it.

    A copy draws from the target's own law, so every ratio is 1 and every draft stands; against a
    one-hot law a draft would stand with its own probability.
    """
    engine = lab.engine(drafter="copy", lookahead=3, verification="rejection")
    sampling = Sampling(temperature=1.0)
    prompts = lab.prompts((2, 5, 9, 14))
    lab.run(
        engine,
        [lab.request(str(i), p, sampling=sampling, seed=i) for i, p in enumerate(prompts)],
    )
    assert engine.stats().tested > 30
    assert engine.stats().accepted == engine.stats().tested


@pytest.mark.parametrize("drafter", ["copy", "noisy", "random", "constant", "trimmed"])
def test_temperature_0_compares_with_the_best_token_alone(lab: Any, drafter: str) -> None:
    """jaymody/speculative-sampling#9: at temperature 0 a ratio of untempered laws let other tokens
    than the best one through."""
    engine = lab.engine(drafter=drafter, lookahead=4, verification="rejection")
    prompts = lab.prompts((1, 6, 17))
    replies = [lab.request(str(i), p, seed=i) for i, p in enumerate(prompts)]
    lab.run(engine, replies)
    for reply, prompt in zip(replies, prompts, strict=True):
        lab.assert_same(reply, generated(lab.target(), prompt, 16))


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("rank", [2, 3, 10])
def test_a_good_but_not_the_best_draft_is_rejected_at_temperature_0(
    lab: Any, verification: Any, rank: int
) -> None:
    """jaymody/speculative-sampling#9 again, with drafts that are likely under both laws."""
    prompt = lab.prompts([6])[0]
    expected = plain_output(lab, prompt, GREEDY, tokens=12)
    rows = lab.logits([*prompt, *expected])[len(prompt) - 1 : -1]
    plan = np.argsort(-rows, axis=-1)[:, rank - 1].tolist()
    engine = lab.engine(floor=Script({"a": plan}), verification=verification)
    (tokens,) = lab.run(engine, [lab.request("a", prompt, max_tokens=12)])
    assert tokens == expected
    assert engine.stats().tested == 11
    assert engine.stats().accepted == 0


@pytest.mark.parametrize("lookahead", [1, 2, 6])
def test_prompt_lookup_leaves_the_text_alone(lab: Any, lookahead: int) -> None:
    """tgi#2997: lookup of two tokens in the prompt turned answers into nonsense."""
    motif = lab.prompts([5])[0]
    prompts = [motif * 4, [3, 3, 3, 3], motif + lab.prompts([9])[0] + motif, [7]]
    samplings = [GREEDY, GREEDY, Sampling(temperature=0.6), Sampling(temperature=0.9, top_p=0.8)]
    floor = NgramDrafter(max_n=3, min_n=1)
    engine = lab.engine(floor=floor, lookahead=lookahead, slots=3)
    replies = [
        lab.request(str(i), p, max_tokens=24, sampling=s, seed=i)
        for i, (p, s) in enumerate(zip(prompts, samplings, strict=True))
    ]
    lab.run(engine, replies)
    for index, reply in enumerate(replies):
        expected = plain_output(lab, prompts[index], samplings[index], tokens=24, seed=index)
        lab.assert_same(reply, expected)
    assert engine.stats().accepted > 0


@pytest.mark.parametrize("drafter", ["copy", "noisy", "none"])
def test_a_low_temperature_and_a_penalty_give_every_request_its_own_text(
    lab: Any, drafter: str
) -> None:
    """vllm#22987: at temperature 0.1 with a repetition penalty a tenth of the answers differed."""
    sampling = Sampling(temperature=0.1, repetition_penalty=1.3)
    prompts = lab.prompts([1 + index % 9 for index in range(20)], seed=8)
    engine = lab.engine(drafter=drafter, lookahead=4)
    replies = [
        lab.request(str(i), p, max_tokens=12, sampling=sampling, seed=i)
        for i, p in enumerate(prompts)
    ]
    lab.run(engine, replies)
    for index, reply in enumerate(replies):
        expected = plain_output(lab, prompts[index], sampling, tokens=12, seed=index)
        lab.assert_same(reply, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_coarser_drafter_leaves_a_float32_target_exact(lab: Any, dtype: torch.dtype) -> None:
    """ml-explore/mlx-lm#1423: target and drafter of different precisions, and other text."""
    drafter = lab.drafter("copy")
    drafter.model.to(dtype)
    engine = lab.engine(drafter=drafter, lookahead=4)
    samplings = (GREEDY, GREEDY, Sampling(temperature=1.0))
    prompts = lab.prompts((3, 9, 2))
    replies = [lab.request(str(i), p, sampling=samplings[i], seed=i) for i, p in enumerate(prompts)]
    lab.run(engine, replies)
    for index, reply in enumerate(replies):
        expected = plain_output(lab, prompts[index], samplings[index], tokens=16, seed=index)
        lab.assert_same(reply, expected)
    assert engine.stats().accepted > 20


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_outputs_part_at_a_tie_or_not_at_all(
    lab: Any, dtype: torch.dtype
) -> None:
    """vllm#7627, #7962, ml-explore/mlx-lm#1423: texts differ in half precision, which is allowed
    where the two best tokens tie within its rounding, and nowhere else."""
    model = copy.deepcopy(lab.target()).to(dtype)
    rounding = 8 * torch.finfo(dtype).eps
    prompts = lab.prompts((3, 9, 2, 30, 5, 6))
    outputs = []
    for kind in ("none", "copy", "noisy"):
        drafter = lab.drafter(kind)
        if drafter is not None:
            drafter.model.to(dtype)
        engine = engine_over(model, drafter=drafter)
        replies = [lab.request(str(i), p, max_tokens=20) for i, p in enumerate(prompts)]
        outputs.append(lab.run(engine, replies))
    for drafted in outputs[1:]:
        for prompt, one, other in zip(prompts, outputs[0], drafted, strict=True):
            at = next((i for i in range(20) if one[i] != other[i]), None)
            if at is None:
                continue
            with torch.inference_mode():
                row = model(input_ids=torch.tensor([prompt + one[:at]])).logits[0, -1].float()
            best = row.topk(2).values
            assert float(best[0] - best[1]) <= rounding * float(row.abs().max()), at


@pytest.mark.parametrize("wrong", range(6))
def test_one_wrong_draft_at_every_offset_of_a_block(lab: Any, wrong: int) -> None:
    """vllm#22987 and its kin: what follows a rejection is drawn after the target's own token."""
    prompt = lab.prompts([4])[0]
    for sampling in (GREEDY, Sampling(temperature=1.0, presence_penalty=0.6)):
        expected = plain_output(lab, prompt, sampling, tokens=14, seed=3)
        plan = list(expected)
        plan[wrong] = (plan[wrong] + 1) % VOCAB
        engine = lab.engine(floor=Script({"a": plan}), lookahead=6)
        reply = lab.request("a", prompt, max_tokens=14, sampling=sampling, seed=3)
        lab.run(engine, [reply])
        assert reply.tokens == expected
        assert reply.calls[0] == wrong + 1
        assert engine.stats().tested - engine.stats().accepted == 1


def test_one_token_of_a_prompt(house: House) -> None:
    """tf#30042: a prompt of one token shifted the cache and changed the answer."""
    for token in (5, 77, 300):
        for temperature in (0, 0.7):
            (choice,) = house.answers(
                COMPLETIONS, prompt=[token], temperature=temperature, ignore_eos=True
            )
            assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("temperature", [0, 0.7])
def test_a_served_answer_is_the_targets(house: House, temperature: float) -> None:
    """vllm#8071: nonsense at temperature 0.7 and nothing but BOS at 0 once a drafter was loaded.

    Greedily it is what full passes of the plain model write, and as without drafts in any case.
    """
    prompt = house.tokenizer("How many rows")["input_ids"]
    (choice,) = house.answers(
        COMPLETIONS, prompt=prompt, temperature=temperature, max_tokens=20, ignore_eos=True
    )
    if temperature == 0:
        written = house.greedy(prompt, 20)
        assert choice["text"] == house.tokenizer.decode(written, skip_special_tokens=True)
