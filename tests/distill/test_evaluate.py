"""Measures of a drafter on held-out traces, by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from draftkeep.distill.evaluate import (
    Evaluation,
    TraceScore,
    evaluate,
    paired,
    raw_expected_acceptance,
    walk_of,
)
from draftkeep.distill.replay import Replayed
from draftkeep.distill.selection import Opened
from draftkeep.ingest.trace import Finish, Origin
from draftkeep.kernels.measures import Walk
from draftkeep.kernels.sampling import Sampling
from tests.distill.conftest import GREEDY, VOCAB, make_trace, opened, toy_drafter


def _replayed(agree: str) -> Replayed:
    """One letter a position: y agrees, n does not, - nothing proposed."""
    accept_T = np.array([float(letter == "y") for letter in agree])
    proposed_T = np.array([letter != "-" for letter in agree])
    draft_T = np.where(proposed_T, 0, -1)
    return Replayed(draft_T=draft_T, accept_T=accept_T, proposed_T=proposed_T)


def _walk(agree: str, finish: Finish, *, cut: bool = False) -> Walk:
    trace = make_trace([3], [4] * len(agree), torch.zeros(len(agree), VOCAB), sampling=GREEDY)
    trace = replace(trace, finish=finish, output_cut=cut)
    return walk_of(trace, _replayed(agree), 3)


def test_the_walk_knows_what_ended_the_output() -> None:
    # By length, four tokens: three drafts and the bonus, in one step.
    assert _walk("yyyy", Finish.LENGTH) == Walk(steps=1, tested=3, accepted=3, tokens=4)
    # By EOS there was room for more: the engine starts another step and tests the last one too.
    assert _walk("yyyyy", Finish.STOP) == Walk(steps=2, tested=4, accepted=4, tokens=5)
    assert _walk("yyyyy", Finish.LENGTH) == Walk(steps=2, tested=3, accepted=3, tokens=5)
    # A cut trace goes on where its record stops.
    assert _walk("yyyyy", Finish.LENGTH, cut=True) == Walk(steps=2, tested=4, accepted=4, tokens=5)
    assert _walk("ynyy", Finish.STOP) == Walk(steps=2, tested=4, accepted=3, tokens=4)


def test_positions_without_a_proposal_are_plain_steps() -> None:
    assert _walk("yn--", Finish.STOP) == Walk(steps=3, tested=2, accepted=1, tokens=4)
    assert _walk("---", Finish.STOP) == Walk(steps=3, tested=0, accepted=0, tokens=3)


def _score(number: int, domain: str | None, accepted: float, proposed: int) -> TraceScore:
    name = bytes([number]) * 16
    return TraceScore(
        trace_id=name,
        request=name,
        domain=domain,
        accepted=accepted,
        proposed=proposed,
        walk=Walk(steps=number, tokens=2 * number),
    )


def test_means_are_over_positions_and_split_by_domain() -> None:
    found = Evaluation(
        scores=(_score(1, "sql", 1, 2), _score(2, "sql", 8, 8), _score(3, None, 0, 5)), lookahead=4
    )
    assert found.replay_acceptance == pytest.approx(9 / 15)
    assert found.walk == Walk(steps=6, tokens=12)
    parts = found.by_domain()
    assert list(parts) == [None, "sql"]
    assert parts["sql"].replay_acceptance == pytest.approx(0.9)
    assert math.isnan(Evaluation(scores=(), lookahead=4).replay_acceptance)


def test_chances_count_beside_certainties() -> None:
    replayed = Replayed(
        draft_T=np.full(3, -1), accept_T=np.array([0.5, 0.25, 0.0]), proposed_T=np.ones(3, bool)
    )
    trace = make_trace([3], [4] * 3, torch.zeros(3, VOCAB), sampling=Sampling())
    done = walk_of(replace(trace, finish=Finish.STOP), replayed, 1)
    # A step at 1 starts after a rejection at 0; one at 2 unless it is the bonus of that at 1.
    assert done.tested == done.steps == pytest.approx(1 + 0.5 + 0.5 + 0.5 * 0.75)
    assert done.accepted == pytest.approx(0.5 + 0.5 * 0.25)
    both = Evaluation(scores=(_score(1, "sql", 0.75, 3), _score(2, "sql", 2, 2)), lookahead=1)
    assert both.replay_acceptance == pytest.approx(2.75 / 5)


def test_only_traces_that_both_were_measured_on_are_paired() -> None:
    before = Evaluation(
        scores=(_score(1, "sql", 1, 4), _score(2, "sql", 1, 4), _score(3, "sql", 0, 0)),
        lookahead=4,
    )
    after = Evaluation(
        scores=(_score(1, "sql", 3, 4), _score(3, "sql", 1, 1), _score(4, "sql", 1, 1)),
        lookahead=4,
    )
    (pair,) = paired(after, before)
    assert (pair.request, pair.incumbent, pair.candidate) == (bytes([1]) * 16, 0.25, 0.75)


def test_what_cannot_be_replayed_is_left_out(
    target: LlamaForCausalLM, corpus: list[Opened]
) -> None:
    trace = corpus[1].trace
    items = [
        opened(trace, 0),
        opened(trace, 1, origin=Origin.RELABELLED),
        opened(trace, 2, origin=Origin.TAP),
        opened(replace(trace, prompt_cut=True), 3),
        opened(replace(corpus[0].trace, seed=None), 4),
    ]
    copy = toy_drafter(target, layers=2, vocab_ids=torch.arange(VOCAB))
    found = evaluate(copy, items, context=64, lookahead=4)
    assert [score.trace_id for score in found.scores] == [items[0].header.trace_id]
    assert found.replay_acceptance == 1.0


def test_expected_acceptance_of_a_copy_is_the_stored_mass(
    target: LlamaForCausalLM, corpus: list[Opened]
) -> None:
    traces = [item.trace for item in corpus]
    mass = np.concatenate([1 - np.exp(trace.topk.tail_T) for trace in traces])
    copy = toy_drafter(target, layers=2, vocab_ids=torch.arange(VOCAB))
    assert raw_expected_acceptance(copy, traces) == pytest.approx(float(mass.mean()), abs=1e-5)
    # Ids that a drafter lacks have q = 0; what it has gains by that, up to p.
    half = toy_drafter(target, layers=2, vocab_ids=torch.arange(0, VOCAB, 2))
    even = np.concatenate(
        [(np.exp(t.topk.logprobs_TK) * (t.topk.ids_TK % 2 == 0)).sum(axis=1) for t in traces]
    )
    assert raw_expected_acceptance(half, traces) == pytest.approx(float(even.mean()), abs=1e-5)
    assert math.isnan(raw_expected_acceptance(copy, []))
