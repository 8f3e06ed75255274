"""One update: the loss by hand, its normalisation, and what it leaves alone."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from draftkeep.distill.learner import Learner
from draftkeep.distill.selection import Opened
from draftkeep.errors import ModelError, StoreError
from draftkeep.store.models.drafter import Drafter
from tests.distill.conftest import GREEDY, VOCAB, make_trace, toy_drafter

BIGRAMS = torch.tensor([[0.0, 1.0], [2.0, 0.0]])


def _bigram(target: LlamaForCausalLM) -> Drafter:
    """A drafter over ids 0 and 1 whose logits after token i are BIGRAMS[i]."""
    drafter = toy_drafter(target, layers=1, vocab_ids=torch.tensor([0, 1]))
    model = drafter.model
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight.zero_()
        embedding[0, 0] = embedding[1, 1] = 1.0
        # The norm scales a unit vector of width C to sqrt(C).
        model.lm_head.weight.zero_()[:, :2] = BIGRAMS.T / math.sqrt(embedding.shape[1])
    return drafter


def _kl(teacher: tuple[float, float], after: int) -> float:
    student = BIGRAMS[after].softmax(dim=0).tolist()
    return sum(p * math.log(p / q) for p, q in zip(teacher, student, strict=True))


def test_the_loss_is_that_of_the_token_before_each_position(target: LlamaForCausalLM) -> None:
    teachers = ((0.9, 0.1), (0.2, 0.8), (0.5, 0.5))
    trace = make_trace([0], [1, 1, 0], torch.tensor(teachers).log(), sampling=GREEDY, k=2)
    # Position 0 follows the prompt's 0; positions 1 and 2 follow the outputs 1 and 1.
    by_hand = (_kl(teachers[0], 0) + _kl(teachers[1], 1) + _kl(teachers[2], 1)) / 3
    loss = Learner(_bigram(target), bfloat16=False).update([trace], rate=0.0)
    assert loss == pytest.approx(by_hand, rel=1e-4)


def test_a_position_weighs_the_same_in_a_long_and_in_a_short_trace(
    target: LlamaForCausalLM,
) -> None:
    long = make_trace([0], [1, 1, 0, 1], torch.randn(4, 2), sampling=GREEDY, k=2)
    short = make_trace([0, 1, 1, 0], [1], torch.randn(1, 2), sampling=GREEDY, k=2)
    learner = Learner(_bigram(target), bfloat16=False)
    alone = [learner.update([trace], rate=0.0) for trace in (long, short)]
    together = learner.update([long, short], rate=0.0)
    assert together == pytest.approx((4 * alone[0] + alone[1]) / 5, rel=1e-4)


def test_embeddings_stay_and_everything_else_moves(
    target: LlamaForCausalLM, corpus: list[Opened]
) -> None:
    drafter = toy_drafter(target, layers=1, vocab_ids=torch.arange(VOCAB))
    before = {name: w.clone() for name, w in drafter.model.state_dict().items()}
    Learner(drafter, bfloat16=False).update([item.trace for item in corpus[:4]], rate=1e-3)
    changed = {n for n, w in drafter.model.state_dict().items() if not torch.equal(w, before[n])}
    assert changed == set(before) - {"model.embed_tokens.weight"}


def test_bfloat16_gives_nearly_the_same_loss(
    target: LlamaForCausalLM, corpus: list[Opened]
) -> None:
    traces = [item.trace for item in corpus[:8]]
    losses = []
    for bfloat16 in (False, True):
        drafter = toy_drafter(target, layers=1, vocab_ids=torch.arange(VOCAB))
        learner = Learner(drafter, bfloat16=bfloat16)
        losses.append(learner.update(traces, rate=0.0))
        assert {w.dtype for w in learner.state(1).values()} == {torch.float32}
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
    assert losses[1] != losses[0]


def test_both_kinds_of_attention_are_used_and_give_the_same_loss(
    target: LlamaForCausalLM, corpus: list[Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    traces = [item.trace for item in corpus[:8]]
    drafter = toy_drafter(target, layers=1, vocab_ids=torch.arange(VOCAB))
    # Its layers come from another network, with that network's config.
    other = toy_drafter(target, layers=1, vocab_ids=torch.arange(VOCAB))
    drafter.model.model.layers = other.model.model.layers
    fused = 0
    real = torch.nn.functional.scaled_dot_product_attention

    def counting(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal fused
        fused += 1
        return real(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counting)
    learner = Learner(drafter, bfloat16=False)
    plain = learner.update(traces, rate=0.0)
    assert fused == 0
    monkeypatch.setattr("draftkeep.distill.learner._PLAIN_ATTENTION_TOKENS", 0)
    assert learner.update(traces, rate=0.0) == pytest.approx(plain, rel=1e-5)
    assert fused == 1
    assert drafter.model.config._attn_implementation == "sdpa"


def test_a_copy_of_the_target_has_nothing_to_learn(
    target: LlamaForCausalLM, corpus: list[Opened]
) -> None:
    traces = [item.trace for item in corpus]
    copy = toy_drafter(target, layers=2, vocab_ids=torch.arange(VOCAB))
    assert abs(Learner(copy, bfloat16=False).update(traces, rate=0.0)) < 1e-6


def test_agreement_counts_the_targets_best_token(
    target: LlamaForCausalLM, corpus: list[Opened]
) -> None:
    traces = [item.trace for item in corpus]
    whole = toy_drafter(target, layers=2, vocab_ids=torch.arange(VOCAB))
    assert Learner(whole, bfloat16=False).agreement(traces) == 1.0
    best = [int(token) for trace in traces for token in trace.topk.ids_TK[:, 0]]
    without = torch.tensor([token for token in range(VOCAB) if token != best[0]])
    lacking = toy_drafter(target, layers=2, vocab_ids=without)
    expected = 1.0 - best.count(best[0]) / len(best)
    assert Learner(lacking, bfloat16=False).agreement(traces) == pytest.approx(expected)


def test_a_loss_that_is_not_finite_changes_nothing(
    target: LlamaForCausalLM, corpus: list[Opened]
) -> None:
    drafter = toy_drafter(target, layers=1, vocab_ids=torch.arange(VOCAB))
    with torch.no_grad():
        drafter.model.lm_head.weight[3] = torch.nan
    before = drafter.model.model.norm.weight.clone()
    with pytest.raises(ModelError, match="learning_rate"):
        Learner(drafter, bfloat16=False).update([corpus[0].trace], rate=1.0)
    assert torch.equal(drafter.model.model.norm.weight, before)


def test_the_state_of_another_network_is_refused(
    target: LlamaForCausalLM, corpus: list[Opened]
) -> None:
    learner = Learner(toy_drafter(target, layers=1, vocab_ids=torch.arange(VOCAB)), bfloat16=False)
    learner.update([corpus[0].trace], rate=1e-3)
    state = learner.state(1)
    other = Learner(toy_drafter(target, layers=2, vocab_ids=torch.arange(VOCAB)), bfloat16=False)
    with pytest.raises(StoreError, match="another network"):
        other.restore(1, state)
    with pytest.raises(StoreError, match="another network"):
        learner.restore(1, {n: w for n, w in state.items() if not n.startswith("exp_avg_sq")})


def test_greedy_and_sampled_traces_teach_the_same_raw_distribution(
    target: LlamaForCausalLM, corpus: list[Opened]
) -> None:
    trace = corpus[0].trace
    learner = Learner(toy_drafter(target, layers=1, vocab_ids=torch.arange(VOCAB)), bfloat16=False)
    sampled = learner.update([trace], rate=0.0)
    assert learner.update([replace(trace, sampling=GREEDY)], rate=0.0) == sampled
