"""Which rows of a pass reach the host, and that each request is judged on its own.

Shapes: N rows of the pass, V vocabulary.
"""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftkeep.serve.engine.host_copy import copied_rows, host_rows

SPANS = st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=8)


def _asked(widths: list[tuple[int, bool]]) -> tuple[torch.Tensor, list[slice]]:
    """Logits of a pass of rows that wide, and the spans of those that are asked for."""
    ends = np.cumsum([width for width, _ in widths]).tolist()
    spans = [slice(end - width, end) for end, (width, _) in zip(ends, widths, strict=True)]
    logits_NV = torch.randn(ends[-1], 7, generator=torch.Generator().manual_seed(1))
    return logits_NV, [span for span, (_, asked) in zip(spans, widths, strict=True) if asked]


@given(widths=SPANS)
def test_both_ways_to_the_host_hand_over_the_rows_asked_for(
    widths: list[tuple[int, bool]],
) -> None:
    logits_NV, spans = _asked(widths)
    expected = [logits_NV[span].numpy() for span in spans]
    for found in (list(host_rows(logits_NV, spans)), list(copied_rows(logits_NV, spans))):
        assert len(found) == len(expected)
        assert all(map(np.array_equal, found, expected))


def test_on_the_cpu_nothing_is_copied() -> None:
    logits_NV, spans = _asked([(2, True), (1, False), (3, True)])
    assert all(np.shares_memory(one, logits_NV.numpy()) for one in host_rows(logits_NV, spans))


def test_a_copy_holds_no_row_that_was_not_asked_for() -> None:
    logits_NV, spans = _asked([(2, True), (5, False), (3, True)])
    for one in copied_rows(logits_NV, spans):
        assert one.base is not None
        assert one.base.size == 5 * 7
