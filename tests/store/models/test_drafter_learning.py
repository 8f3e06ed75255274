"""The toy target is worth distilling: a drafter cut from it learns to propose what it says.

Shapes: B rows, T positions, D drafter vocabulary, N counted positions.
"""

from typing import Any

import torch
from torch import Tensor

from draftkeep.store.models.drafter import Drafter, cold_drafter
from draftkeep.store.models.target import TargetModel, load_target
from draftkeep.store.models.tiny_text import dialogues

PAD = 0
HELD_OUT = 32
STEPS = 50
ROWS = 16


def test_greedy_agreement_on_held_out_text_rises_a_lot() -> None:
    target = load_target("tiny")
    ids_BT, counted_BT = _served(target, requests=HELD_OUT + 160)
    drafter = cold_drafter(target, layers=1, vocab=512)
    held = ids_BT[:HELD_OUT], counted_BT[:HELD_OUT]
    cold = _agreement(drafter, *held)
    _distil(drafter, target, ids_BT[HELD_OUT:], counted_BT[HELD_OUT:])
    learned = _agreement(drafter, *held)
    assert cold < 0.5
    assert learned > cold + 0.25


def _served(target: TargetModel, *, requests: int) -> tuple[Tensor, Tensor]:
    """Greedy answers of the target: ids, and where the next token is an output token."""
    tokenizer = target.tokenizer
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "system", "content": system}, {"role": "user", "content": question}],
            add_generation_prompt=True,
            tokenize=False,
        )
        for system, question, _ in dialogues(requests, seed=4321)
    ]
    rows = [tokenizer(prompt, add_special_tokens=False)["input_ids"] for prompt in prompts]
    width = max(map(len, rows))
    ids_BT = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    with torch.inference_mode():
        whole_BT = target.model.generate(
            ids_BT,
            attention_mask=(ids_BT != PAD).long(),
            max_new_tokens=32,
            do_sample=False,
            pad_token_id=PAD,
        )
    counted_BT = torch.zeros_like(whole_BT, dtype=torch.bool)
    counted_BT[:, width - 1 : -1] = whole_BT[:, width:] != PAD
    return whole_BT.clone(), counted_BT


def _logits_ND(model: torch.nn.Module, ids_BT: Tensor, counted_BT: Tensor) -> Tensor:
    mask_BT = (ids_BT != PAD).long()
    logits: Tensor = model(ids_BT, attention_mask=mask_BT).logits
    return logits[counted_BT]


def _agreement(drafter: Drafter, ids_BT: Tensor, counted_BT: Tensor) -> float:
    with torch.inference_mode():
        proposed_N = drafter.vocab_ids[_logits_ND(drafter.model, ids_BT, counted_BT).argmax(-1)]
    said_N = ids_BT.roll(-1, dims=1)[counted_BT]
    return float((proposed_N == said_N).double().mean())


def _distil(drafter: Drafter, target: TargetModel, ids_BT: Tensor, counted_BT: Tensor) -> None:
    trained = [p for p in drafter.model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    for step in range(STEPS):
        rows = slice(step * ROWS % len(ids_BT), step * ROWS % len(ids_BT) + ROWS)
        batch = ids_BT[rows], counted_BT[rows]
        with torch.inference_mode():
            teacher_ND = _logits_ND(target.model, *batch).softmax(-1)
        student_ND = _logits_ND(drafter.model, *batch).log_softmax(-1)
        loss: Any = -(teacher_ND.clone() * student_ND).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
