"""Greedy output is the target's own, whatever drafts it and whoever runs beside it."""

from typing import Any

import pytest
import torch

from draftkeep.serve.passes.packed import PackedLinear
from tests.serve.lab import generated

LENGTHS = (1, 3, 40, 2, 17, 5, 29, 8)


@pytest.fixture(scope="module")
def expected(lab: Any) -> Any:
    return [generated(lab.target(), prompt, 12) for prompt in lab.prompts(LENGTHS)]


@pytest.mark.parametrize("kind", ["none", "copy", "random", "constant", "noisy", "trimmed"])
@pytest.mark.parametrize("lookahead", [1, 4, 8])
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_equals_transformers_generate(
    lab: Any, expected: Any, kind: Any, lookahead: Any, batch: Any
) -> None:
    engine = lab.engine(drafter=kind, lookahead=lookahead, slots=batch)
    prompts = lab.prompts(LENGTHS)[: 2 * batch + 1]
    replies = [lab.request(str(i), p, max_tokens=12) for i, p in enumerate(prompts)]
    lab.run(engine, replies)
    for reply, tokens in zip(replies, expected, strict=False):
        lab.assert_same(reply, tokens)
    stats = engine.stats()
    assert stats.output_tokens == 12 * len(replies)
    if kind == "copy":
        assert stats.tested == stats.accepted > 0
    if kind == "none":
        assert stats.tested == 0
        assert all(set(reply.calls) == {1} for reply in replies)


def test_packed_weights_give_the_same_tokens(
    lab: Any, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed: list[PackedLinear] = []
    real = PackedLinear.forward

    def forward(layer: PackedLinear, x: torch.Tensor) -> torch.Tensor:
        packed.append(layer)
        return real(layer, x)

    engine = lab.engine(drafter="noisy", packing="always")
    monkeypatch.setattr(PackedLinear, "forward", forward)
    replies = [lab.request(str(i), p, max_tokens=12) for i, p in enumerate(lab.prompts(LENGTHS))]
    lab.run(engine, replies)
    for reply, tokens in zip(replies, expected, strict=True):
        lab.assert_same(reply, tokens)
    assert packed


def test_long_prompts_are_read_in_pieces(lab: Any) -> None:
    prompt = lab.prompts([300 - 60])[0]
    engine = lab.engine(drafter="copy", max_context=256)
    reply = lab.request("a", prompt, max_tokens=8)
    short = lab.request("b", prompt[:4], max_tokens=8)
    lab.run(engine, [reply, short])
    lab.assert_same(reply, generated(lab.target(), prompt, 8))
    lab.assert_same(short, generated(lab.target(), prompt[:4], 8))


def test_a_slot_serves_one_request_after_another(lab: Any, expected: Any) -> None:
    """Long then short in one slot: nothing of the longer request may shine through."""
    engine = lab.engine(drafter="copy", slots=1)
    order = [2, 0, 6, 1, 4, 3]
    prompts = lab.prompts(LENGTHS)
    replies = [lab.request(str(i), prompts[i], max_tokens=12) for i in order]
    lab.run(engine, replies)
    for reply, index in zip(replies, order, strict=True):
        lab.assert_same(reply, expected[index])


def test_a_drafter_with_a_short_context_stops_drafting_there(lab: Any, expected: Any) -> None:
    drafter = lab.drafter("copy")
    drafter.model.config.max_position_embeddings = 30
    engine = lab.engine(drafter=drafter)
    replies = [lab.request(str(i), p, max_tokens=12) for i, p in enumerate(lab.prompts(LENGTHS))]
    lab.run(engine, replies)
    for reply, tokens in zip(replies, expected, strict=True):
        lab.assert_same(reply, tokens)
    assert set(replies[2].calls) == {1}
    assert max(replies[1].calls) > 1
