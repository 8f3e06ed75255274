"""The row a position is trained on is that of the token before it, and padding teaches nothing."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftkeep.distill.batch import hidden_NC, make_batch, make_inputs, prompted_T, trainable_T
from draftkeep.ingest.trace import Trace, ValueKind
from tests.distill.conftest import GREEDY, VOCAB, make_trace


def _echo() -> Any:
    """A body whose hidden state at a position spells the token at that position."""

    def forward(input_ids: Tensor, use_cache: bool) -> Any:
        assert not use_cache
        hidden = torch.nn.functional.one_hot(input_ids, VOCAB).float()
        return SimpleNamespace(last_hidden_state=hidden)

    return SimpleNamespace(model=forward)


def _trace(prompt: list[int], output: list[int]) -> Trace:
    return make_trace(prompt, output, torch.randn(len(output), VOCAB), sampling=GREEDY)


_IDS = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6)


@settings(deadline=None, max_examples=40)
@given(rows=st.lists(st.tuples(_IDS, _IDS), min_size=1, max_size=4), start=st.integers(0, 1))
def test_every_position_is_produced_by_the_token_before_it(
    rows: list[tuple[list[int], list[int]]], start: int
) -> None:
    rows = [([*prompt, 5], output) for prompt, output in rows]
    traces = [_trace(prompt, output) for prompt, output in rows]
    inputs = make_inputs(traces, [prompted_T(trace) for trace in traces], start=start)
    before = [[prompt[-1], *output[:-1]] for prompt, output in rows]
    assert hidden_NC(_echo(), inputs).argmax(dim=1).tolist() == [t for row in before for t in row]


def test_only_the_kept_positions_are_computed() -> None:
    traces = [_trace([3, 4], [5, 6, 7]), _trace([8], [9])]
    keep = [np.array([False, True, False]), np.array([True])]
    hidden = hidden_NC(_echo(), make_inputs(traces, keep))
    assert hidden.argmax(dim=1).tolist() == [5, 8]


def test_positions_without_a_known_raw_distribution_do_not_teach() -> None:
    trace = _trace([3], [4, 5, 6])
    assert trainable_T(trace).tolist() == [True, True, True]
    gaps = replace(
        trace.topk,
        k_T=np.array([6, 0, 6], np.uint8),
        tail_known_T=np.array([True, True, False]),
    )
    assert trainable_T(replace(trace, topk=gaps)).tolist() == [True, False, False]
    for kind in (ValueKind.PROCESSED, ValueKind.UNKNOWN):
        assert not trainable_T(replace(trace, value_kind=kind)).any()


def test_an_output_without_a_prompt_has_nothing_before_its_first_token() -> None:
    trace = replace(_trace([3], [4, 5, 6]), prompt_ids_P=np.array([], np.int32))
    assert trainable_T(trace).tolist() == [False, True, True]
    hidden = hidden_NC(_echo(), make_inputs([trace], [trainable_T(trace)]))
    assert hidden.argmax(dim=1).tolist() == [4, 5]


def test_mass_outside_the_drafters_vocabulary_goes_to_the_tail() -> None:
    # p = 0.5, 0.3 listed, 0.2 in the tail; the drafter knows only id 1, as its index 0.
    logits = torch.tensor([[0.3, 0.5, 0.15, 0.05]]).log()
    trace = make_trace([2], [1], logits, sampling=GREEDY, k=2)
    batch = make_batch([trace], torch.tensor([-1, 0, -1, -1]))
    assert batch.ids_NK.tolist() == [[0, -1]]
    assert batch.logprobs_NK[0].exp().tolist() == pytest.approx([0.5, 0.0])
    assert batch.tail_N.exp().tolist() == pytest.approx([0.5])


def test_lists_of_different_width_share_a_batch() -> None:
    wide = make_trace([2], [1], torch.zeros(1, 4), sampling=GREEDY, k=3)
    slim = make_trace([2], [1], torch.zeros(1, 4), sampling=GREEDY, k=1)
    batch = make_batch([slim, wide], torch.arange(4))
    assert batch.ids_NK.tolist() == [[0, -1, -1], [0, 1, 2]]
    mass = batch.logprobs_NK.exp().sum(dim=1) + batch.tail_N.exp()
    assert mass.tolist() == pytest.approx([1.0, 1.0])
