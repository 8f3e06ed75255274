"""Looking through the rows that are wanted, whatever lies between them."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftkeep.errors import ModelError
from draftkeep.kernels.topk import topk_lse
from draftkeep.serve.engine.spans import Span, look_through

VOCAB = 12
# Each request's (emitted rows, rows behind a rejected draft).
PASSES = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 4)), min_size=1, max_size=4)


def spans_of(parts: list[tuple[int, int]]) -> tuple[list[Span], int]:
    """A pass's spans, and how many logit rows it has."""
    nothing: Any = None
    spans, at = [], 0
    for emitted, behind in parts:
        spans.append(
            Span(row=nothing, verdict=nothing, first=at, count=emitted, output_at=0, drafts=())
        )
        at += emitted + behind
    return spans, at


@given(PASSES, st.integers(1, VOCAB), st.sampled_from([None, torch.nan, torch.inf]))
def test_rows_that_nobody_emits_change_nothing(
    parts: list[tuple[int, int]], k: int, filler: float | None
) -> None:
    spans, rows = spans_of(parts)
    logits_NV = torch.randn((rows, VOCAB), generator=torch.Generator().manual_seed(rows))
    expected = [topk_lse(logits_NV[span.first : span.first + span.count], k) for span in spans]
    if filler is not None:
        wanted = {span.first + t for span in spans for t in range(span.count)}
        logits_NV[[row for row in range(rows) if row not in wanted]] = filler
    logits_PV, moved, top = look_through(logits_NV, spans, k)
    for span, was, alone in zip(moved, spans, expected, strict=True):
        part = slice(span.first, span.first + span.count)
        assert torch.equal(logits_PV[part], logits_NV[was.first : was.first + was.count])
        assert torch.equal(top.ids_NK[part], alone.ids_NK)
        torch.testing.assert_close(top.logprobs_NK[part], alone.logprobs_NK)
        torch.testing.assert_close(top.tail_N[part], alone.tail_N)


@given(PASSES, st.data())
def test_a_broken_row_that_is_wanted_is_refused(
    parts: list[tuple[int, int]], data: st.DataObject
) -> None:
    spans, rows = spans_of(parts)
    logits_NV = torch.zeros((rows, VOCAB))
    span = data.draw(st.sampled_from(spans))
    logits_NV[span.first + data.draw(st.integers(0, span.count - 1)), 3] = torch.nan
    with pytest.raises(ModelError, match="finite"):
        look_through(logits_NV, spans, 2)
