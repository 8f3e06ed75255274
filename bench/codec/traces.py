"""Traces of a real model for the codec bench: sampled completions of chat prompts.

Suffixes: B rows of a batch, T positions, V vocabulary, K list entries.
"""

from collections.abc import Iterator

import numpy as np
import torch

from draftkeep.ingest.trace import DrafterRun, Finish, How, TopK, Trace
from draftkeep.kernels.sampling import Sampling
from draftkeep.kernels.topk import topk_lse
from draftkeep.store.models.target import TargetModel

K = 32
POSITIONS = 128
LEAST_POSITIONS = 100
BATCH = 8
TEMPERATURES = (0.7, 0.8, 0.9, 1.0)
PROMPTS = (
    "Write a short story about a lighthouse keeper who finds a map.",
    "Explain how photosynthesis works to a ten year old.",
    "Write a Python function that merges two sorted lists, and explain it.",
    "Plan a birthday party for a child who loves dinosaurs.",
    "How do I make a sourdough starter from scratch?",
    "Compare renting and buying a home.",
    "Describe a day in the life of a deep sea fish.",
    "Write SQL that finds the three best customers of each country, and explain it.",
    "What should a beginner know about investing?",
    "Write a dialogue between the sun and the moon.",
    "How does a refrigerator work?",
    "Write a letter of complaint about a late train.",
    "Explain recursion with an example from daily life.",
    "Invent a sport and explain its rules.",
    "Tell me about the history of chess.",
    "Give me an outline of an essay on the ethics of zoos.",
)


def sampled_traces(target: TargetModel, *, batches: int, seed: int) -> Iterator[Trace]:
    """Completions sampled from the target's whole distribution, at the temperatures in turn.

    Drafts are simulated: each is drawn from the stored head of its position, so accepted and
    corrected positions occur as under a good drafter. Completions under 100 tokens are left out.
    """
    for batch in range(batches):
        temperature = TEMPERATURES[batch % len(TEMPERATURES)]
        prompts = [PROMPTS[(batch * BATCH + row) % len(PROMPTS)] for row in range(BATCH)]
        torch.manual_seed(seed + batch)
        rng = np.random.default_rng(seed + batch)
        for prompt_ids, output_ids, topk in _complete(target, prompts, temperature):
            if len(output_ids) >= LEAST_POSITIONS:
                yield _trace(target, prompt_ids, output_ids, topk, temperature, rng)


def _complete(
    target: TargetModel, prompts: list[str], temperature: float
) -> Iterator[tuple[list[int], list[int], TopK]]:
    chats = [
        target.tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        for prompt in prompts
    ]
    ids = [target.tokenizer(chat, add_special_tokens=False)["input_ids"] for chat in chats]
    widest = max(map(len, ids))
    pad = target.eos_ids[0]
    prompt_BT = torch.tensor([[pad] * (widest - len(row)) + row for row in ids])
    mask_BT = torch.tensor([[0] * (widest - len(row)) + [1] * len(row) for row in ids])
    with torch.inference_mode():
        made = target.model.generate(
            input_ids=prompt_BT,
            attention_mask=mask_BT,
            max_new_tokens=POSITIONS,
            do_sample=True,
            temperature=temperature,
            top_k=0,
            top_p=1.0,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=pad,
        )
    for row, prompt_ids in enumerate(ids):
        output_ids = _until_end(made.sequences[row, widest:].tolist(), target.eos_ids)
        logits_TV = torch.stack([step_BV[row] for step_BV in made.logits[: len(output_ids)]])
        yield prompt_ids, output_ids, _topk(logits_TV)


def _until_end(output_ids: list[int], eos_ids: tuple[int, ...]) -> list[int]:
    ends = [index for index, token in enumerate(output_ids) if token in eos_ids]
    return output_ids[: ends[0] + 1] if ends else output_ids


def _topk(logits_TV: torch.Tensor) -> TopK:
    found = topk_lse(logits_TV, K)
    positions = len(logits_TV)
    return TopK(
        ids_TK=found.ids_NK.numpy().astype(np.int32),
        logprobs_TK=found.logprobs_NK.numpy(),
        k_T=np.full(positions, K, np.uint8),
        tail_T=found.tail_N.numpy(),
        tail_known_T=np.ones(positions, np.bool_),
    )


def _trace(
    target: TargetModel,
    prompt_ids: list[int],
    output_ids: list[int],
    topk: TopK,
    temperature: float,
    rng: np.random.Generator,
) -> Trace:
    positions = len(output_ids)
    output_ids_T = np.array(output_ids, np.int32)
    below_TK = np.exp(topk.logprobs_TK).cumsum(axis=1) < rng.random((positions, 1))
    drafts_T = topk.ids_TK[np.arange(positions), np.minimum(below_TK.sum(axis=1), K - 1)]
    corrected_T = drafts_T != output_ids_T
    return Trace(
        prompt_ids_P=np.array(prompt_ids, np.int32),
        output_ids_T=output_ids_T,
        topk=topk,
        how_T=np.where(corrected_T, How.CORRECTED, How.ACCEPTED).astype(np.uint8),
        rejected_T=np.where(corrected_T, drafts_T, -1).astype(np.int32),
        sampling=Sampling(temperature=temperature, eos_ids=target.eos_ids),
        seed=int(rng.integers(2**63)),
        choice=0,
        finish=Finish.STOP if output_ids[-1] in target.eos_ids else Finish.LENGTH,
        chat_template_hash=target.chat_template_hash,
        drafters=(DrafterRun(drafter=rng.bytes(32), context_start=0, positions=positions),),
    )
