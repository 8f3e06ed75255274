"""Replay: what a drafter would have had accepted on a served trace, exactly and without the target.

Under the coupled rule an output depends on target, seed and position alone, and the noise comes
back from the logged seed. So a drafter's proposal at output position t would have been accepted
exactly where argmax(log q_t + G_t) is the logged token (argmax q_t at temperature 0), with q_t
the drafter's processed distribution after the logged tokens before t.

T: output positions; V: the target's vocabulary; D: the drafter's.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from draftkeep.distill.batch import hidden_NC, make_inputs
from draftkeep.errors import ModelError
from draftkeep.ingest.trace import Trace
from draftkeep.kernels.draw import choose
from draftkeep.kernels.measures import replay_acceptance
from draftkeep.kernels.noise import gumbel
from draftkeep.kernels.processors import process
from draftkeep.store.drafter import Drafter

_BATCH_TRACES = 16
_NOTHING = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One drafter over one trace.

    proposed_T says where the drafter proposes a token at all, agree_T where that token is the
    logged one (so never where nothing is proposed). draft_T holds the proposals, -1 for none.
    """

    draft_T: NDArray[np.int64]
    agree_T: NDArray[np.bool_]
    proposed_T: NDArray[np.bool_]

    @property
    def acceptance(self) -> float:
        """Replay acceptance: the mean of agree_T over proposals; NaN without any."""
        return replay_acceptance(self.agree_T, self.proposed_T)


def replayable(trace: Trace) -> bool:
    """Whether a trace can be replayed exactly: its whole prompt and its noise are known."""
    return not trace.prompt_cut and (trace.seed is not None or trace.sampling.greedy)


@torch.inference_mode()
def replay(
    drafter: Drafter, traces: Sequence[Trace], *, context: int, context_start: int = 0
) -> Iterator[Replayed]:
    """Replays each of `traces` (all `replayable`) in order; every output position, EOS included.

    `context` is the live limit in tokens: a drafter that would have to read more proposes nothing.
    `context_start` is the absolute token position, prompt first, where the drafter's own context
    begins, and nothing is proposed before it. A logged token outside the drafter's vocabulary
    counts as a proposal of something else. Arithmetic is that of the model, float32 as it is
    stored; equal to the engine up to near-ties.
    """
    model: Any = drafter.model
    model.eval()
    vocab_ids_D, vocab = drafter.vocab_ids.numpy(), int(model.config.vocab_size)
    for first in range(0, len(traces), _BATCH_TRACES):
        group = traces[first : first + _BATCH_TRACES]
        keep = [_within_T(trace, context, context_start) for trace in group]
        hidden = hidden_NC(model, make_inputs(group, keep, start=context_start))
        parts = hidden.split_with_sizes([int(keep_T.sum()) for keep_T in keep])
        for trace, keep_T, part in zip(group, keep, parts, strict=True):
            logits_ND = model.lm_head(part).float().numpy()
            yield _replayed(trace, np.flatnonzero(keep_T), logits_ND, vocab_ids_D, vocab)


def _within_T(trace: Trace, context: int, context_start: int) -> NDArray[np.bool_]:
    """The positions at which the drafter has at least one and at most `context` tokens to read."""
    read_T = np.arange(trace.positions) + len(trace.prompt_ids_P) - context_start
    return (read_T > 0) & (read_T <= context)


def _replayed(
    trace: Trace,
    index_N: NDArray[np.int64],
    logits_ND: NDArray[np.float32],
    vocab_ids_D: NDArray[np.int64],
    vocab: int,
) -> Replayed:
    draft_T = np.full(trace.positions, _NOTHING, dtype=np.int64)
    if trace.sampling.plain_argmax:
        # Ascending ids, so the first of equals is the lowest, as everywhere.
        draft_T[index_N] = vocab_ids_D[logits_ND.argmax(axis=1)]
    else:
        for index, logits_D in zip(index_N.tolist(), logits_ND, strict=True):
            draft_T[index] = _draft(trace, index, logits_D, vocab_ids_D, vocab)
    proposed_T = draft_T != _NOTHING
    return Replayed(
        draft_T=draft_T,
        agree_T=proposed_T & (draft_T == trace.output_ids_T),
        proposed_T=proposed_T,
    )


def _draft(
    trace: Trace,
    index: int,
    logits_D: NDArray[np.float32],
    vocab_ids_D: NDArray[np.int64],
    vocab: int,
) -> int:
    """The drafter's proposal for output position `index`, from the logged tokens before it."""
    logits_V = np.full(vocab, -np.inf, dtype=np.float32)
    logits_V[vocab_ids_D] = logits_D
    try:
        scores_V = process(
            logits_V,
            trace.sampling,
            prompt_ids=trace.prompt_ids_P.tolist(),
            output_ids=trace.output_ids_T[:index].tolist(),
        )
    except ModelError:
        # Everything the drafter knows is barred here; the engine drafts nothing either.
        return _NOTHING
    if trace.sampling.greedy or trace.seed is None:
        return choose(scores_V, None)
    return choose(scores_V, gumbel(trace.seed, trace.choice, index, vocab))
