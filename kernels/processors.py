"""From logits to the distribution a token is drawn from, processor version 1.

One chain makes the target's p and the drafter's q, in serving and in replay.

V: vocabulary of the target (a drafter's row is spread over it, -inf where it has no entry);
N: a row or a part of it; M: the entries kept.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from draftkeep.errors import InputError, ModelError
from draftkeep.kernels.sampling import Sampling

_FIRST_HEAD = 256
_BLOCKS = 1024
_SORT_ALL = 4096
_LEVELS_PER_NAT = 8
_LEVELS = 512


def process(
    logits_V: NDArray[np.float32],
    sampling: Sampling,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
) -> NDArray[np.float64]:
    """The processed scores of one position: log p up to a constant, -inf outside the support.

    Stages in order, each skipped at its neutral value:
    1. bias: added to its ids; while fewer than `min_tokens` outputs exist, EOS and stop ids
       become -inf;
    2. repetition: ids seen in prompt or output, once each: a positive logit is divided by the
       penalty, any other multiplied;
    3. presence: subtracted once from every id in the output;
    4. frequency: times its count in the output, subtracted from every id in the output;
    5. temperature: the maximum is subtracted, then the row divided; float32 before, float64 from
       here on;
    6. min-p: keeps ids with p >= min_p * max p;
    7. top-k: keeps the k best, ties by the lowest id;
    8. top-p: keeps the shortest prefix, in order of falling p (ties by the lowest id), whose share
       of the mass left by the stages before is at least top_p; always at least one id.
    Temperature 0 (argmax) ends after stage 4.

    `logits_V` is only read; -inf entries (padding of a vocabulary) stay -inf. The result is the
    caller's. Raises ModelError for NaN or +inf logits and where no id is possible, InputError
    where a bias or history id lies outside the row.
    """
    kept_M, scores_M = support(logits_V, sampling, prompt_ids=prompt_ids, output_ids=output_ids)
    if kept_M is None:
        return scores_M
    out_V = np.full(len(logits_V), -np.inf)
    out_V[kept_M] = scores_M
    return out_V


def support(
    logits_V: NDArray[np.float32],
    sampling: Sampling,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
) -> tuple[NDArray[np.int64] | None, NDArray[np.float64]]:
    """The ids that stages 6 to 8 keep, ascending, and their processed scores.

    None in place of the ids where those stages are neutral: then the scores are all of them, -inf
    where an id was ruled out before. Otherwise as `process`.
    """
    raw_V = penalised(logits_V, sampling, prompt_ids=prompt_ids, output_ids=output_ids)
    best = finite_max(raw_V)
    if sampling.greedy:
        return None, raw_V.astype(np.float64)
    scores_V = tempered(raw_V, best, sampling)
    if sampling.keeps_all:
        return None, scores_V
    kept_M = np.sort(_kept(scores_V, sampling))
    return kept_M, scores_V[kept_M]


def tempered(raw_M: NDArray[np.float32], best: float, sampling: Sampling) -> NDArray[np.float64]:
    """Stage 5 for any part of a row whose maximum is `best`."""
    scores_M = raw_M.astype(np.float64)
    scores_M -= best
    # A tiny temperature sends what it rules out to -inf, which is what it means.
    with np.errstate(over="ignore"):
        scores_M /= sampling.temperature
    return scores_M


def log_softmax64(scores_V: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural log-probabilities of a row of scores, -inf kept. One entry must be finite."""
    shifted_V: NDArray[np.float64] = scores_V - scores_V.max()
    shifted_V -= np.log(np.exp(shifted_V).sum())
    return shifted_V


def finite_max(raw_V: NDArray[np.float32]) -> float:
    """The best of a row of logits; ModelError where there is none, or one is not a number."""
    best = float(raw_V.max(initial=-np.inf))
    if np.isfinite(best):
        return best
    if best == -np.inf:
        raise ModelError(
            f"no token is possible: all {raw_V.size} logits are -inf; check the model's weights, "
            "logit_bias and min_tokens"
        )
    raise ModelError(
        f"logits hold {best}, expected numbers below +inf; the model's weights or its arithmetic "
        "are broken: verify the files or use a wider dtype"
    )


def penalised(
    logits_V: NDArray[np.float32],
    sampling: Sampling,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
) -> NDArray[np.float32]:
    """Stages 1 to 4 on a copy, or the row itself where they change nothing."""
    barred = len(output_ids) < sampling.min_tokens
    if not (sampling.logit_bias or barred or sampling.needs_history):
        return logits_V
    row_V = logits_V.astype(np.float32, copy=True)
    vocab = len(row_V)
    for token, bias in sampling.logit_bias:
        if not 0 <= token < vocab:
            raise InputError("logit_bias names an id outside the vocabulary", param="logit_bias")
        row_V[token] += np.float32(bias)
    if barred:
        row_V[[i for i in {*sampling.eos_ids, *sampling.stop_ids} if 0 <= i < vocab]] = -np.inf
    if sampling.repetition_penalty != 1.0:
        seen_M = np.union1d(_history(prompt_ids, vocab), _history(output_ids, vocab))
        penalty = np.float32(sampling.repetition_penalty)
        seen = row_V[seen_M]
        row_V[seen_M] = np.where(seen > 0, seen / penalty, seen * penalty)
    if sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0:
        out_M, count_M = np.unique(_history(output_ids, vocab), return_counts=True)
        row_V[out_M] -= np.float32(sampling.presence_penalty)
        row_V[out_M] -= np.float32(sampling.frequency_penalty) * count_M.astype(np.float32)
    return row_V


def _history(ids: Sequence[int], vocab: int) -> NDArray[np.int64]:
    ids_N = np.asarray(ids, dtype=np.int64)
    if ids_N.size and (ids_N.min() < 0 or ids_N.max() >= vocab):
        raise InputError(
            f"prompt or output holds an id outside the vocabulary of {vocab}; "
            "check that tokenizer and model belong together"
        )
    return ids_N


def _kept(scores_V: NDArray[np.float64], sampling: Sampling) -> NDArray[np.int64]:
    """The ids that min-p, top-k and top-p keep. The maximum of `scores_V` is 0."""
    kept_M: NDArray[np.int64] | None = None
    if sampling.min_p > 0.0:
        # The best id stays whatever min_p says.
        kept_M = np.flatnonzero(scores_V >= min(np.log(sampling.min_p), 0.0))
    if sampling.top_k > 0:
        picked_M = _head(scores_V if kept_M is None else scores_V[kept_M], sampling.top_k)
        kept_M = np.sort(picked_M if kept_M is None else kept_M[picked_M])
    if sampling.top_p < 1.0:
        picked_M = _nucleus(scores_V if kept_M is None else scores_V[kept_M], sampling.top_p)
        kept_M = picked_M if kept_M is None else kept_M[picked_M]
    return np.arange(len(scores_V)) if kept_M is None else kept_M


def _head(scores_N: NDArray[np.float64], k: int) -> NDArray[np.int64]:
    """Indices of the k best scores in rank order: value descending, index ascending."""
    size = len(scores_N)
    if size <= _SORT_ALL:
        return np.argsort(-scores_N, kind="stable")[:k]
    if k >= size:
        bound = -np.inf
    elif k <= _BLOCKS // 4:
        # k blocks have a maximum of at least this, so k entries do: a bound without a full sort.
        width = size // _BLOCKS * _BLOCKS
        best_B = scores_N[:width].reshape(-1, _BLOCKS).max(axis=0)
        bound = np.partition(best_B, _BLOCKS - k)[_BLOCKS - k]
    else:
        bound = np.partition(scores_N, size - k)[size - k]
    near_M = np.flatnonzero(scores_N >= bound)
    return near_M[np.argsort(-scores_N[near_M], kind="stable")[:k]]


def _nucleus(scores_N: NDArray[np.float64], top_p: float) -> NDArray[np.int64]:
    """Indices of the shortest ranked prefix that holds `top_p` of the mass, at least one.

    The maximum of `scores_N` is 0.
    """
    weights_N = np.exp(scores_N)
    wanted = top_p * float(weights_N.sum())
    ranked_M = _head(scores_N, _FIRST_HEAD)
    mass_M = np.cumsum(weights_N[ranked_M])
    if mass_M[-1] < wanted and len(ranked_M) < len(scores_N):
        # Only the levels of score that the prefix reaches are sorted, and one more for rounding.
        level_N = np.minimum(-_LEVELS_PER_NAT * scores_N, _LEVELS).astype(np.int64)
        mass_L = np.cumsum(np.bincount(level_N, weights_N))
        near_M = np.flatnonzero(level_N <= np.searchsorted(mass_L, wanted) + 1)
        ranked_M = near_M[np.argsort(-scores_N[near_M], kind="stable")]
        mass_M = np.cumsum(weights_N[ranked_M])
    return ranked_M[: int(np.searchsorted(mass_M, wanted)) + 1]
