"""One target pass over all rows of a step, and what each row may emit from it.

Shapes: N logit rows of the pass (drafts + 1 of each request, one request after another), V target
vocabulary, W one request's rows.
"""

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from draftkeep.errors import DraftkeepError
from draftkeep.kernels.coupled import Verified, verify, verify_argmax
from draftkeep.kernels.topk import TopKLse, topk_lse
from draftkeep.serve.request import RejectedBranch
from draftkeep.serve.row import Row
from draftkeep.serve.runner import ModelRunner, Segment


def target_pass(runner: ModelRunner, rows: Sequence[Row]) -> Tensor:
    """Feed every row's last token and drafts; return logits_NV."""
    return runner.forward(
        [
            Segment(
                slot=row.slot,
                tokens=[*row.tokens[row.target_len :], *row.drafts],
                start=row.target_len,
                want=len(row.drafts) + 1,
            )
            for row in rows
        ]
    )


def judge(logits_NV: Tensor, rows: Sequence[Row]) -> list[Verified | DraftkeepError]:
    """What each row emits, or the error that concerns this row alone."""
    best_N, values_N = _argmax(logits_NV, rows)
    verdicts: list[Verified | DraftkeepError] = []
    at = 0
    for row in rows:
        width = len(row.drafts) + 1
        sampling = row.request.sampling
        try:
            if sampling.plain_argmax:
                best, values = best_N[at : at + width], values_N[at : at + width]
                verdicts.append(verify_argmax(best, values, row.drafts, sampling))
            else:
                verdicts.append(_sampled(logits_NV[at : at + width], row))
        except DraftkeepError as error:
            verdicts.append(error)
        at += width
    return verdicts


def capture(
    logits_NV: Tensor,
    rows: Sequence[Row],
    verdicts: Sequence[Verified | DraftkeepError],
    *,
    k: int,
    branches: bool,
) -> None:
    """Store the raw top-k of every position about to be emitted, for rows that capture.

    Must run before the rows take their tokens. With `branches` the distributions behind a rejected
    draft are stored too.
    """
    picked: list[int] = []
    places: list[tuple[Row, Verified, int]] = []
    at = 0
    for row, verdict in zip(rows, verdicts, strict=True):
        width = len(row.drafts) + 1
        if row.k and isinstance(verdict, Verified):
            rest = width if branches and verdict.tested > verdict.accepted else 0
            count = max(len(verdict.tokens), rest)
            picked += range(at, at + count)
            places.append((row, verdict, count))
        at += width
    if not picked:
        return
    top = topk_lse(logits_NV if len(picked) == at else logits_NV[picked], k)
    start = 0
    for row, verdict, count in places:
        _store(row, verdict, count, top, start)
        start += count


def _argmax(logits_NV: Tensor, rows: Sequence[Row]) -> tuple[list[int], list[float]]:
    """Best id (the lowest of equals) and its logit for every row of the pass, where needed."""
    if not any(row.request.sampling.plain_argmax for row in rows):
        return [], []
    best_N = logits_NV.argmax(dim=-1)
    values_N = logits_NV.gather(1, best_N[:, None])[:, 0]
    return best_N.tolist(), values_N.tolist()


def _sampled(logits_WV: Tensor, row: Row) -> Verified:
    return verify(
        logits_WV.cpu().numpy(),
        row.drafts,
        row.request.sampling,
        prompt_ids=row.request.prompt_ids,
        output_ids=row.output_ids,
        noise=row.noise,
    )


def _store(row: Row, verdict: Verified, count: int, top: TopKLse, start: int) -> None:
    """Copy one row's part of `top`, emitted positions first, then the rejected branch."""
    ids = top.ids_NK[start : start + count].cpu().numpy()
    logprobs = top.logprobs_NK[start : start + count].cpu().numpy()
    tails = top.tail_N[start : start + count].cpu().numpy()
    emitted, at = len(verdict.tokens), row.output_len
    row.ids_TK[at : at + emitted] = ids[:emitted]
    row.logprobs_TK[at : at + emitted] = logprobs[:emitted]
    row.tail_T[at : at + emitted] = tails[:emitted]
    if count > emitted:
        row.branches.append(
            RejectedBranch(
                start=at + verdict.accepted,
                draft_ids_N=np.array(row.drafts[verdict.accepted :], np.int32),
                ids_NK=ids[emitted:].astype(np.int32),
                logprobs_NK=logprobs[emitted:].copy(),
                tail_N=tails[emitted:].copy(),
            )
        )
