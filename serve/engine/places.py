"""Places: which logit rows of a step are one request's emitted positions.

Shapes: N logit rows of the pass, P of them looked through, V target vocabulary.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from draftkeep.errors import DraftkeepError
from draftkeep.kernels.outcome import Verified
from draftkeep.serve.engine.row import Row

_DENSE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """`count` logit rows of one request from `first` on; the emitted positions come first.

    `output_at` and `drafts` are the row's before it took the tokens of `verdict`.
    """

    row: Row
    verdict: Verified
    first: int
    count: int
    output_at: int
    drafts: tuple[int, ...]


def emitted(rows: Sequence[Row], verdicts: Sequence[Verified | DraftkeepError]) -> Iterator[Place]:
    """The emitted positions of every row that has a verdict, in a pass with drafts + 1 logit rows
    of each. Must run before the rows take their tokens.
    """
    at = 0
    for row, verdict in zip(rows, verdicts, strict=True):
        if isinstance(verdict, Verified):
            yield Place(
                row=row,
                verdict=verdict,
                first=at,
                count=len(verdict.tokens),
                output_at=row.output_len,
                drafts=tuple(row.drafts),
            )
        at += len(row.drafts) + 1


def sound(verdicts: Sequence[Verified | DraftkeepError]) -> bool:
    """True where no request of the pass failed."""
    return all(isinstance(verdict, Verified) for verdict in verdicts)


def gathered(
    logits_NV: Tensor, places: Sequence[Place], *, sound: bool
) -> tuple[Tensor, list[Place]]:
    """logits_PV with the rows of `places`, and the places in it.

    Neighbours are a view, and where most rows are wanted the few others come along: copying rows of
    a whole vocabulary costs more than looking through them. Not so where the pass is not `sound`:
    the others may be the row of a request that failed, which no top-k takes.
    """
    first, wanted = places[0].first, sum(place.count for place in places)
    end = places[-1].first + places[-1].count
    if wanted >= (_DENSE if sound else 1.0) * (end - first):
        return logits_NV[first:end], [replace(place, first=place.first - first) for place in places]
    picked: list[int] = []
    moved = []
    for place in places:
        moved.append(replace(place, first=len(picked)))
        picked += range(place.first, place.first + place.count)
    return logits_NV[picked], moved
