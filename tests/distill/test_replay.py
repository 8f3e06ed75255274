"""Replay against what the coupled rule says by definition."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from draftkeep.distill.replay import Replayed, replay, replayable
from draftkeep.distill.selection import Opened
from draftkeep.ingest.trace import Finish, Trace
from draftkeep.kernels.noise import gumbel
from draftkeep.kernels.sampling import Sampling
from draftkeep.store.models.drafter import Drafter
from draftkeep.store.models.manifest import Manifest
from tests.distill.conftest import EOS, GREEDY, VOCAB, make_trace, serve, toy_drafter


class _Table(nn.Module):
    """A drafter that answers token i with a fixed row of logits."""

    def __init__(self, rows_VD: Tensor) -> None:
        super().__init__()
        self.rows_VD = rows_VD
        self.config = SimpleNamespace(vocab_size=len(rows_VD))

    def model(self, input_ids: Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(last_hidden_state=self.rows_VD[input_ids])

    def lm_head(self, hidden_ND: Tensor) -> Tensor:
        return hidden_ND


def _table(rows: list[list[float]], vocab_ids: list[int]) -> Drafter:
    manifest = Manifest(target="", tokenizer="", layers=1, vocab=len(vocab_ids))
    return Drafter(
        model=_Table(torch.tensor(rows)),
        vocab_ids=torch.tensor(vocab_ids),
        digest=b"",
        manifest=manifest,
        tokenizer_dir=None,  # type: ignore[arg-type]
    )


def _only(drafter: Drafter, trace: Trace, *, context: int = 64, start: int = 0) -> Replayed:
    (found,) = replay(drafter, [trace], context=context, context_start=start)
    return found


def test_greedy_agreement_by_hand() -> None:
    # After 0 it proposes 1, after 1 it proposes 3 (index 2), after 3 it proposes 1, after 2: 0.
    drafter = _table([[0, 9, 0], [0, 0, 9], [9, 0, 0], [0, 9, 0]], [0, 1, 3])
    trace = make_trace([0], [1, 3, 2, 0, 1], torch.zeros(5, 4), sampling=GREEDY)
    found = _only(drafter, trace)
    # Token 2 is outside its vocabulary: a proposal of something else, not an untested position.
    assert found.draft_T.tolist() == [1, 3, 1, 0, 1]
    assert found.accept_T.tolist() == [1, 1, 0, 1, 1]
    assert found.proposed_T.all()
    assert found.acceptance == pytest.approx(0.8)


def test_ties_go_to_the_lowest_target_id() -> None:
    trace = make_trace([0], [2, 3], torch.zeros(2, 4), sampling=GREEDY)
    assert _only(_table([[5, 5]] * 4, [2, 3]), trace).draft_T.tolist() == [2, 2]


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**64 - 1),
    choice=st.integers(0, 3),
    temperature=st.floats(0.2, 2.0),
    top_p=st.sampled_from([1.0, 0.7]),
    data=st.data(),
)
def test_sampled_proposals_by_definition(
    seed: int, choice: int, temperature: float, top_p: float, data: st.DataObject
) -> None:
    ids = [0, 1, 3, 5]
    rows = data.draw(
        st.lists(
            st.lists(st.floats(-3, 3, width=32), min_size=4, max_size=4), min_size=6, max_size=6
        )
    )
    output = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    sampling = Sampling(temperature=temperature, top_p=top_p)
    trace = make_trace(
        [2], output, torch.zeros(len(output), 6), sampling=sampling, seed=seed, choice=choice
    )
    found = _only(_table(rows, ids), trace)
    for index, before in enumerate([2, *output[:-1]]):
        q = np.exp(np.array(rows[before], np.float32).astype(float) / temperature)
        q /= q.sum()
        order = np.argsort(-q, kind="stable")
        kept = order[: int(np.searchsorted(np.cumsum(q[order]), top_p * q.sum())) + 1]
        noise = gumbel(seed, choice, index, 6)
        best = max(kept, key=lambda column: np.log(q[column]) + noise[ids[column]])
        assert found.draft_T[index] == ids[best]
        assert found.accept_T[index] == (ids[best] == output[index])


SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": Sampling(temperature=0.9, eos_ids=(EOS,)),
    "filters": Sampling(temperature=1.2, top_p=0.8, top_k=7, min_p=0.02, eos_ids=(EOS,)),
    "history": Sampling(
        temperature=0.7,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        eos_ids=(EOS,),
    ),
    "greedy with history": Sampling(
        temperature=0.0, repetition_penalty=1.3, min_tokens=4, eos_ids=(EOS,)
    ),
    "biased": Sampling(temperature=0.8, logit_bias=((3, 1.5), (7, -2.0)), eos_ids=(EOS,)),
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_copy_of_the_target_proposes_every_token_it_served(
    target: LlamaForCausalLM, name: str
) -> None:
    copy = toy_drafter(target, layers=2, vocab_ids=torch.arange(VOCAB))
    traces = [
        serve(target, [4 + n, 9, 3], sampling=SAMPLINGS[name], max_tokens=10, seed=n, choice=n % 2)
        for n in range(6)
    ]
    for trace, found in zip(traces, replay(copy, traces, context=64), strict=True):
        assert found.draft_T.tolist() == trace.output_ids_T.tolist()
        assert found.acceptance == 1.0


def test_the_final_eos_is_replayed_too(target: LlamaForCausalLM) -> None:
    copy = toy_drafter(target, layers=2, vocab_ids=torch.arange(VOCAB))
    ending = Sampling(temperature=1.0, logit_bias=((EOS, 4.0),), eos_ids=(EOS,))
    trace = serve(target, [5, 6], sampling=ending, max_tokens=30, seed=1)
    assert trace.finish is Finish.STOP
    assert _only(copy, trace).accept_T[-1] == 1
    without = [token for token in range(VOCAB) if token != EOS]
    blind = toy_drafter(target, layers=2, vocab_ids=torch.tensor(without))
    found = _only(blind, trace)
    assert found.proposed_T[-1]
    assert found.accept_T[-1] == 0


def test_traces_in_one_batch_do_not_touch_each_other(
    target: LlamaForCausalLM, corpus: list[Opened]
) -> None:
    drafter = toy_drafter(target, layers=1, vocab_ids=torch.arange(1, VOCAB, 2))
    traces = [item.trace for item in corpus]
    together = list(replay(drafter, traces, context=64))
    for trace, found in zip(traces, together, strict=True):
        assert found.draft_T.tolist() == _only(drafter, trace).draft_T.tolist()


def test_positions_past_the_drafters_context_are_not_tested(target: LlamaForCausalLM) -> None:
    copy = toy_drafter(target, layers=2, vocab_ids=torch.arange(VOCAB))
    long = replace(GREEDY, ignore_eos=True)
    trace = serve(target, [4, 5, 6], sampling=long, max_tokens=8)
    found = _only(copy, trace, context=6)
    # Output position t is proposed after reading 3 + t tokens.
    assert found.proposed_T.tolist() == [True] * 4 + [False] * 4
    assert found.accept_T.tolist() == found.proposed_T.tolist()
    assert found.acceptance == 1.0
    nothing = _only(copy, trace, context=2)
    assert not nothing.proposed_T.any()
    assert np.isnan(nothing.acceptance)


def test_a_drafter_that_began_late_reads_only_from_there(target: LlamaForCausalLM) -> None:
    drafter = toy_drafter(target, layers=1, vocab_ids=torch.arange(VOCAB))
    trace = serve(target, [4, 5, 6], sampling=GREEDY, max_tokens=6)
    late = _only(drafter, trace, start=2)
    cut = replace(trace, prompt_ids_P=trace.prompt_ids_P[2:])
    assert late.draft_T.tolist() == _only(drafter, cut).draft_T.tolist()
    after = _only(drafter, trace, start=4)
    assert after.proposed_T.tolist() == [False, False, *[True] * (trace.positions - 2)]


def test_nothing_is_proposed_where_everything_known_is_barred(target: LlamaForCausalLM) -> None:
    bias = tuple((token, -float("inf")) for token in (4, 5))
    barred = Sampling(temperature=0.0, logit_bias=bias, eos_ids=(EOS,))
    trace = serve(target, [4, 5, 6], sampling=barred, max_tokens=4)
    found = _only(toy_drafter(target, layers=1, vocab_ids=torch.tensor([4, 5])), trace)
    assert not found.proposed_T.any()
    assert not found.accept_T.any()


def _without_noise(trace: Trace, p: list[float]) -> Trace:
    return replace(trace, seed=None, processed_logprob_T=np.log(np.array(p, np.float32)))


def test_without_noise_a_position_counts_by_the_ratio_of_its_token() -> None:
    # The drafter knows 0, 1 and 3; at temperature 0.5 its odds are the squares of these.
    rows = torch.tensor([[1.0, 2, 1], [3, 1, 1], [1, 1, 1], [1, 2, 4]]).log().tolist()
    trace = make_trace([0], [1, 0, 2, 3, 1], torch.zeros(5, 4), sampling=Sampling(temperature=0.5))
    found = _only(_table(rows, [0, 1, 3]), _without_noise(trace, [0.8, 0.9, 0.5, 0.2, 0.5]))
    # q: 4/6, 9/11, outside the vocabulary, 1/3 above p, 4/21.
    expected = [4 / 6 / 0.8, 9 / 11 / 0.9, 0.0, 1.0, 4 / 21 / 0.5]
    assert found.accept_T == pytest.approx(expected, rel=1e-6)
    assert found.proposed_T.all()
    assert found.draft_T.tolist() == [-1] * 5
    assert found.acceptance == pytest.approx(sum(expected) / 5)


def test_without_noise_penalties_see_the_logged_tokens_before() -> None:
    sampling = Sampling(frequency_penalty=1.0, logit_bias=((3, -float("inf")),))
    trace = make_trace([1], [1, 1, 0], torch.zeros(3, 4), sampling=sampling)
    found = _only(_table([[0.0] * 4] * 4, [0, 1, 2, 3]), _without_noise(trace, [0.5] * 3))
    q = [1 / 3, math.exp(-1) / (2 + math.exp(-1)), 1 / (2 + math.exp(-2))]
    assert found.accept_T == pytest.approx([value / 0.5 for value in q], rel=1e-6)


def test_without_noise_nothing_is_proposed_where_everything_known_is_barred() -> None:
    barred = Sampling(logit_bias=((0, -float("inf")), (1, -float("inf"))))
    trace = make_trace([0], [2, 3], torch.zeros(2, 4), sampling=barred)
    found = _only(_table([[0.0, 0.0]] * 4, [0, 1]), _without_noise(trace, [0.5, 0.5]))
    assert not found.proposed_T.any()
    assert not found.accept_T.any()
    assert np.isnan(found.acceptance)


def test_without_noise_temperature_0_is_equality(target: LlamaForCausalLM) -> None:
    drafter = toy_drafter(target, layers=1, vocab_ids=torch.arange(VOCAB))
    penalised = replace(GREEDY, repetition_penalty=1.3)
    for sampling in (GREEDY, penalised):
        trace = serve(target, [4, 5, 6], sampling=sampling, max_tokens=12)
        served = _without_noise(trace, [1.0] * trace.positions)
        found, known = _only(drafter, served), _only(drafter, trace)
        assert found.draft_T.tolist() == known.draft_T.tolist()
        assert found.accept_T.tolist() == known.accept_T.tolist()
        assert set(found.accept_T.tolist()) <= {0.0, 1.0}


def test_a_cut_prompt_or_no_noise_and_no_log_p_cannot_be_replayed(
    target: LlamaForCausalLM, corpus: list[Opened]
) -> None:
    sampled, greedy = corpus[0].trace, corpus[1].trace
    lost = replace(sampled, seed=None)
    ratio = _without_noise(sampled, [0.5] * sampled.positions)
    assert replayable(sampled)
    assert replayable(ratio)
    assert replayable(replace(greedy, seed=None))
    assert not replayable(lost)
    assert not replayable(replace(greedy, prompt_cut=True))
    assert not replayable(replace(ratio, prompt_cut=True))
    with pytest.raises(ValueError, match="replayable"):
        _only(toy_drafter(target, layers=1, vocab_ids=torch.arange(VOCAB)), lost)
