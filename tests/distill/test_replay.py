"""Replay against what the coupled rule says by definition."""

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
from draftkeep.store.drafter import Drafter
from draftkeep.store.manifest import Manifest
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
    assert found.agree_T.tolist() == [True, True, False, True, True]
    assert found.proposed_T.all()
    assert found.acceptance == pytest.approx(0.8)


def test_ties_go_to_the_lowest_target_id() -> None:
    trace = make_trace([0], [3], torch.zeros(1, 4), sampling=GREEDY)
    assert _only(_table([[5, 5]] * 4, [3, 2 + 1 + 0 if False else 3 + 0][:1] + [3 + 1 - 1 + 0][:0] or [3, 3]), trace)
