"""Spans: which logit rows of a pass are one request's, and which of them are what it emits.

Shapes: N logit rows of the pass, P of them looked through, V target vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from draftkeep.errors import DraftkeepError, ModelError
from draftkeep.kernels.outcome import Verified
from draftkeep.kernels.topk import TopKLse, topk_lse
from draftkeep.serve.engine.row import Row

_DENSE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """`count` logit rows of one request from `first` on; the emitted positions come first.

    `output_at` and `drafts` are the row's before it took the tokens of `verdict`.
    """

    row: Row
    verdict: Verified
    first: int
    count: int
    output_at: int
    drafts: tuple[int, ...]


def row_slices(rows: Sequence[Row]) -> Iterator[slice]:
    """Each request's logit rows, drafts + 1 of them, one request after another."""
    at = 0
    for row in rows:
        width = len(row.drafts) + 1
        yield slice(at, at + width)
        at += width


def emitted(rows: Sequence[Row], verdicts: Sequence[Verified | DraftkeepError]) -> Iterator[Span]:
    """The emitted positions of every row that has a verdict, in a pass over `rows`.

    Must run before the rows take their tokens.
    """
    for row, verdict, part in zip(rows, verdicts, row_slices(rows), strict=True):
        if isinstance(verdict, Verified):
            yield Span(
                row=row,
                verdict=verdict,
                first=part.start,
                count=len(verdict.tokens),
                output_at=row.output_len,
                drafts=tuple(row.drafts),
            )


def look_through(
    logits_NV: Tensor, spans: Sequence[Span], k: int
) -> tuple[Tensor, list[Span], TopKLse]:
    """logits_PV with the rows of `spans`, the spans in it, and the k best of each of its rows.

    Neighbours are a view, and where most rows are wanted the few others come along: copying rows of
    a whole vocabulary costs more than looking through them. Those others nobody has read, and they
    may hold what no top-k takes; the wanted ones are looked through alone then. Raises ModelError
    where one of these is broken.
    """
    first, wanted = spans[0].first, sum(span.count for span in spans)
    end = spans[-1].first + spans[-1].count
    if wanted >= _DENSE * (end - first):
        view_PV = logits_NV[first:end]
        try:
            top = topk_lse(view_PV, k)
        except ModelError:
            if wanted == end - first:
                raise
        else:
            return view_PV, [replace(span, first=span.first - first) for span in spans], top
    picked: list[int] = []
    moved = []
    for span in spans:
        moved.append(replace(span, first=len(picked)))
        picked += range(span.first, span.first + span.count)
    logits_PV = logits_NV[picked]
    return logits_PV, moved, topk_lse(logits_PV, k)
