"""From a finished request, as the engine hands it over, to the trace that is kept of it."""

import numpy as np

from draftkeep.ingest.trace import Branch, DrafterRun, TopK, Trace
from draftkeep.serve.engine.request import Finished, RejectedBranch


def to_trace(finished: Finished, *, context_tokens: int, chat_template_hash: bytes) -> Trace:
    """The trace of a finished request, its prompt cut to the last `context_tokens`.

    The seed is left out where it does not give the noise back, because the verification rule drew
    more than one number for a token; then the processed log-probabilities are in.
    """
    request = finished.request
    prompt_ids = request.prompt_ids[-context_tokens:]
    return Trace(
        prompt_ids_P=np.asarray(prompt_ids, dtype=np.int32),
        prompt_cut=len(prompt_ids) < len(request.prompt_ids),
        output_ids_T=finished.output_ids_T,
        topk=_topk(finished.ids_TK, finished.logprobs_TK, finished.tail_T),
        how_T=finished.how_T,
        rejected_T=finished.rejected_T,
        sampling=request.sampling,
        seed=request.seed if finished.processed_T is None else None,
        choice=request.choice,
        finish=finished.finish,
        chat_template_hash=chat_template_hash,
        drafters=tuple(
            DrafterRun(drafter=use.digest, context_start=use.context_start, positions=use.positions)
            for use in finished.drafters
        ),
        branches=tuple(_branch(branch) for branch in finished.branches),
        processed_logprob_T=finished.processed_T,
    )


def _branch(branch: RejectedBranch) -> Branch:
    return Branch(
        start=branch.start,
        draft_ids_N=branch.draft_ids_N,
        topk=_topk(branch.ids_NK, branch.logprobs_NK, branch.tail_N),
    )


def _topk(ids_TK: np.ndarray, logprobs_TK: np.ndarray, tail_T: np.ndarray) -> TopK:
    positions, k = ids_TK.shape
    return TopK(
        ids_TK=ids_TK,
        logprobs_TK=logprobs_TK,
        k_T=np.full(positions, k, dtype=np.uint8),
        tail_T=tail_T,
        tail_known_T=np.full(positions, k > 0),
    )
