"""Recorder: the target's raw distributions at the positions a step emits.

They are kept for capture and delivered as log-probabilities, both from one top-k of the step's
logits.

Shapes: N logit rows of the pass, P of them looked through, V target vocabulary, K entries kept, T
tokens emitted.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftkeep.errors import DraftkeepError
from draftkeep.kernels.outcome import Verified
from draftkeep.kernels.topk import TopKLse, topk_lse
from draftkeep.serve.engine.host_copy import HostCopy
from draftkeep.serve.engine.request import RejectedBranch, TokenLogprob
from draftkeep.serve.engine.row import Row

Logprobs = tuple[TokenLogprob, ...] | None
_DENSE = 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Which logit rows are one request's: the emitted positions, then a rejected branch's."""

    row: Row
    verdict: Verified
    first: int
    count: int
    output_at: int
    drafts: tuple[int, ...]


class Recorder:
    """Records steps, one after another, for the engine's thread.

    `k` log-probabilities of each position are captured for rows that capture, with `branches` also
    those behind a rejected draft. Captured values reach their row at the next `settle`, so that a
    device need not be waited for. `on_failure(rows, error)` hears which rows lost their capture; no
    request fails with it.
    """

    def __init__(
        self,
        *,
        k: int,
        branches: bool,
        on_failure: Callable[[Sequence[Row], Exception], None],
    ) -> None:
        self._k = k
        self._branches = branches
        self._on_failure = on_failure
        self._pending: tuple[list[_Place], HostCopy] | None = None

    def record(
        self, logits_NV: Tensor, rows: Sequence[Row], verdicts: Sequence[Verified | DraftkeepError]
    ) -> list[Logprobs]:
        """Start the capture of what `verdicts` emit; return the log-probabilities asked for.

        Must run before the rows take their tokens. logits_NV holds drafts + 1 rows of each of
        `rows`, one request after another, and must not be written to afterwards.
        """
        self.settle()
        try:
            return self._record(logits_NV, rows, verdicts)
        except Exception as error:
            self._give_up([row for row in rows if row.k], error)
            return self._record(logits_NV, rows, verdicts)

    def settle(self) -> None:
        """Bring everything recorded so far into its rows."""
        if self._pending is None:
            return
        (places, copy), self._pending = self._pending, None
        try:
            ids_PK, logprobs_PK, tail_P = copy.arrays()
            for place in places:
                _store(place, ids_PK, logprobs_PK, tail_P)
        except Exception as error:
            self._give_up([place.row for place in places], error)

    def _record(
        self, logits_NV: Tensor, rows: Sequence[Row], verdicts: Sequence[Verified | DraftkeepError]
    ) -> list[Logprobs]:
        places = self._pick(rows, verdicts)
        if not places:
            return [None] * len(rows)
        logits_PV, places = _gathered(logits_NV, places)
        captures = [place for place in places if place.row.k]
        asked = [place for place in places if place.row.request.top_logprobs is not None]
        tops = [place.row.request.top_logprobs or 1 for place in asked]
        top = topk_lse(logits_PV, max([*tops, self._k if captures else 1]))
        if captures:
            self._pending = (captures, HostCopy(_narrowed(top, self._k)))
        found = _logprobs(logits_PV, top, asked) if asked else {}
        return [found.get(id(row)) for row in rows]

    def _pick(
        self, rows: Sequence[Row], verdicts: Sequence[Verified | DraftkeepError]
    ) -> list[_Place]:
        places: list[_Place] = []
        at = 0
        for row, verdict in zip(rows, verdicts, strict=True):
            width = len(row.drafts) + 1
            wanted = row.k or row.request.top_logprobs is not None
            if wanted and isinstance(verdict, Verified):
                rejected = row.k and self._branches and verdict.tested > verdict.accepted
                count = width if rejected else len(verdict.tokens)
                places.append(
                    _Place(
                        row=row,
                        verdict=verdict,
                        first=at,
                        count=count,
                        output_at=row.output_len,
                        drafts=tuple(row.drafts),
                    )
                )
            at += width
        return places

    def _give_up(self, rows: Sequence[Row], error: Exception) -> None:
        self._pending = None
        for row in rows:
            row.stop_capture()
        self._on_failure(rows, error)


def _gathered(logits_NV: Tensor, places: list[_Place]) -> tuple[Tensor, list[_Place]]:
    """logits_PV with the rows of `places`, and the places in it.

    Neighbours are a view, and where most rows are wanted the few others come along: copying rows of
    a whole vocabulary costs more than looking through them.
    """
    first, wanted = places[0].first, sum(place.count for place in places)
    end = places[-1].first + places[-1].count
    if wanted >= _DENSE * (end - first):
        return logits_NV[first:end], [replace(place, first=place.first - first) for place in places]
    picked: list[int] = []
    moved = []
    for place in places:
        moved.append(replace(place, first=len(picked)))
        picked += range(place.first, place.first + place.count)
    return logits_NV[picked], moved


def _narrowed(top: TopKLse, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """ids_PK, logprobs_PK and tail_P of the k best; what lay between them and the list's end is
    tail."""
    if top.ids_NK.shape[1] <= k:
        return top.ids_NK, top.logprobs_NK, top.tail_N
    cut_P = torch.logsumexp(top.logprobs_NK[:, k:], dim=1)
    tail_P = torch.logaddexp(top.tail_N, cut_P)
    return top.ids_NK[:, :k], top.logprobs_NK[:, :k], tail_P


def _logprobs(logits_PV: Tensor, top: TopKLse, places: Sequence[_Place]) -> dict[int, Logprobs]:
    """The entries of every place's emitted tokens, by the identity of its row."""
    at = [place.first + t for place in places for t in range(len(place.verdict.tokens))]
    tokens = [token for place in places for token in place.verdict.tokens]
    own_T = logits_PV[at, tokens].float() - top.lse_N[at]
    ids_TK, logprobs_TK = top.ids_NK[at].tolist(), top.logprobs_NK[at].tolist()
    entries = [
        (own, list(zip(ids, logprobs, strict=True)))
        for own, ids, logprobs in zip(own_T.tolist(), ids_TK, logprobs_TK, strict=True)
    ]
    found: dict[int, Logprobs] = {}
    for place in places:
        count = place.row.request.top_logprobs
        mine, entries = entries[: len(place.verdict.tokens)], entries[len(place.verdict.tokens) :]
        found[id(place.row)] = tuple(
            TokenLogprob(logprob=own, top=tuple(best[:count])) for own, best in mine
        )
    return found


def _store(
    place: _Place,
    ids_PK: NDArray[np.int64],
    logprobs_PK: NDArray[np.float32],
    tail_P: NDArray[np.float32],
) -> None:
    """Copy one request's part, emitted positions first, then the rejected branch."""
    row, verdict, at = place.row, place.verdict, place.output_at
    part = slice(place.first, place.first + place.count)
    ids, logprobs, tails = ids_PK[part], logprobs_PK[part], tail_P[part]
    emitted = len(verdict.tokens)
    row.ids_TK[at : at + emitted] = ids[:emitted]
    row.logprobs_TK[at : at + emitted] = logprobs[:emitted]
    row.tail_T[at : at + emitted] = tails[:emitted]
    if place.count > emitted:
        row.branches.append(
            RejectedBranch(
                start=at + verdict.accepted,
                draft_ids_N=np.array(place.drafts[verdict.accepted :], np.int32),
                ids_NK=ids[emitted:].astype(np.int32),
                logprobs_NK=logprobs[emitted:].copy(),
                tail_N=tails[emitted:].copy(),
            )
        )
