"""Replay: what a drafter would have had accepted on a served trace, without the target.

q_t is the drafter's processed distribution after the logged tokens before output position t.

Under the coupled rule an output depends on target, seed and position alone, and the noise comes
back from the logged seed. So the drafter's proposal would have been accepted exactly where
argmax(log q_t + G_t) is the logged token; at temperature 0, under either rule, where argmax q_t
is. That is 0 or 1.

Under the rejection rule a trace tells the target's processed probability p_t of the logged token
and no noise. The token is a draw from p_t whatever drafted it, so min(1, q_t/p_t) of it is the
chance, given the output, that this drafter's draft was accepted there, and an unbiased estimate
of sum min(p_t, q_t), its acceptance after that prefix (`measures.ratio_acceptance`). The step of
the grid on which log p is stored moves it by less than 0.0003 of itself.

One mean over traces of both rules mixes two acceptances: that of the coupled rule is a little the
lower for the same p and q. Two drafters on the same traces stay comparable, trace by trace.

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
from draftkeep.kernels.measures import ratio_acceptance, replay_acceptance
from draftkeep.kernels.noise import gumbel
from draftkeep.kernels.processors import log_softmax64, process
from draftkeep.store.models.drafter import Drafter

_BATCH_TRACES = 16
_NOTHING = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """One drafter over one trace.

    proposed_T says where the drafter proposes a token at all. accept_T is the chance that what it
    proposes is accepted as the logged token: 0 or 1 where the noise is known, min(1, q/p) where it
    is not, 0 where nothing is proposed. draft_T holds the proposals, -1 where there is none or the
    noise that draws it is not known.
    """

    draft_T: NDArray[np.int64]
    accept_T: NDArray[np.float64]
    proposed_T: NDArray[np.bool_]

    @property
    def acceptance(self) -> float:
        """Replay acceptance: the mean of accept_T over proposals; NaN without any."""
        return replay_acceptance(self.accept_T, self.proposed_T)


def replayable(trace: Trace) -> bool:
    """Whether a trace can be replayed: its whole prompt is known, and its noise or log p."""
    known = _noise_known(trace) or trace.processed_logprob_T is not None
    return known and not trace.prompt_cut


@torch.inference_mode()
def replay(
    drafter: Drafter, traces: Sequence[Trace], *, context: int, context_start: int = 0
) -> Iterator[Replayed]:
    """Replays each of `traces` (all `replayable`) in order; every output position, EOS included.

    `context` is the live limit in tokens: a drafter that would have to read more proposes nothing.
    `context_start` is the absolute token position, prompt first, where the drafter's own context
    begins, and nothing is proposed before it. A logged token outside the drafter's vocabulary
    counts as a proposal of something else. Arithmetic is that of the model, float32 as it is
    stored; where the noise is known, equal to the engine up to near-ties.
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


def _noise_known(trace: Trace) -> bool:
    return trace.seed is not None or trace.sampling.greedy


def _replayed(
    trace: Trace,
    index_N: NDArray[np.int64],
    logits_ND: NDArray[np.float32],
    vocab_ids_D: NDArray[np.int64],
    vocab: int,
) -> Replayed:
    draft_T = np.full(trace.positions, _NOTHING, dtype=np.int64)
    accept_T = np.zeros(trace.positions)
    proposed_T = np.zeros(trace.positions, dtype=np.bool_)
    if trace.sampling.plain_argmax:
        # Ascending ids, so the first of equals is the lowest, as everywhere.
        draft_T[index_N] = vocab_ids_D[logits_ND.argmax(axis=1)]
        proposed_T[index_N] = True
    else:
        for index, logits_D in zip(index_N.tolist(), logits_ND, strict=True):
            scores_V = _scores(trace, index, logits_D, vocab_ids_D, vocab)
            if scores_V is None:
                continue
            proposed_T[index] = True
            if _noise_known(trace):
                draft_T[index] = _draft(trace, index, scores_V)
            else:
                accept_T[index] = _chance(trace, index, scores_V)
    if _noise_known(trace):
        accept_T[draft_T == trace.output_ids_T] = 1.0
    return Replayed(draft_T=draft_T, accept_T=accept_T, proposed_T=proposed_T)


def _scores(
    trace: Trace,
    index: int,
    logits_D: NDArray[np.float32],
    vocab_ids_D: NDArray[np.int64],
    vocab: int,
) -> NDArray[np.float64] | None:
    """log q at output position `index` up to a constant, from the logged tokens before it."""
    logits_V = np.full(vocab, -np.inf, dtype=np.float32)
    logits_V[vocab_ids_D] = logits_D
    try:
        return process(
            logits_V,
            trace.sampling,
            prompt_ids=trace.prompt_ids_P.tolist(),
            output_ids=trace.output_ids_T[:index].tolist(),
        )
    except ModelError:
        # Everything the drafter knows is barred here; the engine drafts nothing either.
        return None


def _draft(trace: Trace, index: int, scores_V: NDArray[np.float64]) -> int:
    """The drafter's proposal, drawn with the noise of the position."""
    if trace.sampling.greedy or trace.seed is None:
        return choose(scores_V, None)
    return choose(scores_V, gumbel(trace.seed, trace.choice, index, len(scores_V)))


def _chance(trace: Trace, index: int, scores_V: NDArray[np.float64]) -> float:
    """The chance that a draft from these scores was accepted as the logged token."""
    if trace.processed_logprob_T is None:
        raise ValueError("expected a replayable trace, got neither its noise nor its log p")
    log_q = log_softmax64(scores_V)[trace.output_ids_T[index]]
    return ratio_acceptance(float(log_q), float(trace.processed_logprob_T[index]))
