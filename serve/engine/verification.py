"""One target pass over all rows of a step, and what each row may emit from it.

Shapes: N logit rows of the pass (drafts + 1 of each request, one request after another), V target
vocabulary, W one request's rows.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from draftkeep.errors import DraftkeepError
from draftkeep.kernels.coupled import verify_argmax, verify_coupled
from draftkeep.kernels.noise import ACCEPT, RECOVERY, gumbel, uniform
from draftkeep.kernels.outcome import Verified
from draftkeep.kernels.rejection import verify_rejection
from draftkeep.kernels.topk import argmax
from draftkeep.serve.engine.host_copy import host_rows
from draftkeep.serve.engine.row import Row
from draftkeep.serve.engine.spans import row_slices
from draftkeep.serve.passes.rectangle import Segment
from draftkeep.serve.passes.runner import ModelRunner

Verification = Literal["coupled", "rejection"]


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


def judge(
    logits_NV: Tensor, rows: Sequence[Row], *, verification: Verification = "coupled"
) -> list[Verified | DraftkeepError]:
    """What each row emits under the rule, or the error that concerns this row alone.

    Under `rejection` each row's `draft_laws` says what its drafts were drawn from.
    """
    plain = [row.request.sampling.plain_argmax for row in rows]
    best_N, values_N = _best(logits_NV) if any(plain) else ([], [])
    slices = list(row_slices(rows))
    drawn = host_rows(
        logits_NV, [part for part, greedy in zip(slices, plain, strict=True) if not greedy]
    )
    rejection = verification == "rejection"
    rule = _rejection if rejection else _coupled
    verdicts: list[Verified | DraftkeepError] = []
    for row, part in zip(rows, slices, strict=True):
        sampling = row.request.sampling
        try:
            if sampling.plain_argmax:
                verdict = verify_argmax(best_N[part], values_N[part], row.drafts, sampling)
                verdicts.append(verdict.certain() if rejection else verdict)
            else:
                verdicts.append(rule(next(drawn), row))
        except DraftkeepError as error:
            verdicts.append(error)
    return verdicts


def _best(logits_NV: Tensor) -> tuple[list[int], list[float]]:
    best_N, values_N = argmax(logits_NV)
    return best_N.tolist(), values_N.tolist()


def _coupled(logits_WV: NDArray[np.float32], row: Row) -> Verified:
    return verify_coupled(
        logits_WV,
        row.drafts,
        row.request.sampling,
        prompt_ids=row.request.prompt_ids,
        output_ids=row.output_ids,
        noise=row.noise,
    )


def _rejection(logits_WV: NDArray[np.float32], row: Row) -> Verified:
    request = row.request
    seed, choice, vocab = request.seed, request.choice, logits_WV.shape[1]
    return verify_rejection(
        logits_WV,
        row.drafts,
        row.draft_laws,
        request.sampling,
        prompt_ids=request.prompt_ids,
        output_ids=row.output_ids,
        uniform=lambda index: uniform(seed, choice, index, ACCEPT),
        noise=lambda index: gumbel(seed, choice, index, vocab, RECOVERY),
    )
