"""The fixed grids on which a body stores log-probabilities and tails.

Lossy by design, and the only lossy part of a body. On a grid of step D nats the mean divergence
of the decoded distribution is about D^2 / 24 times (1 - sum p^2), under 1e-4 nat at D = 1/20.

Suffixes: N any number of values, R rows.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from draftkeep.errors import CodecError

LEVELS_PER_NAT = 20
PROCESSED_PER_NAT = 2048
NO_MASS_LEVEL = 65_535  # minus infinity, on both grids of log-probabilities

TAIL_STEPS_PER_UNIT = 14
TAIL_CENTRE = 200
TAIL_NONE = 0
TAIL_LOW, TAIL_HIGH = 1, 253
TAIL_ALL = 254
TAIL_UNKNOWN = 255

# How far above 0 float32 arithmetic may push a log-probability.
_SLACK = 1e-3
# Closer to 0 than this, a log tail is the whole mass: its logit is past float32.
_ALL_ABOVE = -1e-6


def to_levels(logprobs_N: NDArray[np.floating], per_nat: int) -> NDArray[np.int64]:
    """Log-probabilities to grid levels: round(-logprob * per_nat), at most 65,534.

    Minus infinity becomes 65,535. CodecError where a value is NaN or above 0.
    """
    values_N = logprobs_N.astype(np.float64)
    if not (values_N <= _SLACK).all():
        raise CodecError("a log-probability of the trace is NaN or above 0; check the emitter")
    steps_N = np.rint(np.minimum(-values_N * per_nat, NO_MASS_LEVEL - 1.0))
    steps_N[np.isneginf(values_N)] = NO_MASS_LEVEL
    return np.maximum(steps_N, 0).astype(np.int64)


def from_levels(levels_N: NDArray[np.integer], per_nat: int) -> NDArray[np.float32]:
    """Grid levels, none negative, back to log-probabilities; level 65,535 is minus infinity.

    CodecError where a level is above that.
    """
    try:
        return _logprobs(per_nat).take(levels_N)
    except IndexError:
        raise CodecError(f"trace body has a level above {NO_MASS_LEVEL}; drop the trace") from None


@cache
def _logprobs(per_nat: int) -> NDArray[np.float32]:
    """The log-probability of each level: looking it up takes a third of computing it."""
    values = (np.arange(NO_MASS_LEVEL + 1) / -per_nat).astype(np.float32)
    values[NO_MASS_LEVEL] = -np.inf
    return values + np.float32(0)  # level 0 is 0.0, not -0.0


def to_tail_codes(
    log_tail_R: NDArray[np.floating], known_R: NDArray[np.bool_]
) -> NDArray[np.uint8]:
    """Natural logs of tail masses to one byte each: a logit, or none, all, unknown.

    CodecError where a known tail is NaN or above 0.
    """
    log_tail_R = np.where(known_R, log_tail_R.astype(np.float64), -1.0)
    if not (log_tail_R <= _SLACK).all():
        raise CodecError("a tail of the trace is NaN or above the whole mass; check the emitter")
    all_R = log_tail_R > _ALL_ABOVE
    none_R = np.isneginf(log_tail_R)
    finite_R = np.where(all_R | none_R, -1.0, log_tail_R)
    logit_R = finite_R - np.log1p(-np.exp(finite_R))
    steps_R = np.rint(logit_R * TAIL_STEPS_PER_UNIT) + TAIL_CENTRE
    codes_R: NDArray[np.uint8] = np.clip(steps_R, TAIL_LOW, TAIL_HIGH).astype(np.uint8)
    codes_R[all_R] = TAIL_ALL
    codes_R[none_R] = TAIL_NONE
    codes_R[~known_R] = TAIL_UNKNOWN
    return codes_R


def from_tail_codes(codes_R: NDArray[np.integer]) -> NDArray[np.float32]:
    """Tail bytes back to natural logs. Unknown reads as minus infinity beside its flag."""
    return _LOG_TAILS.take(codes_R)


def _log_tails() -> NDArray[np.float32]:
    codes = np.arange(TAIL_UNKNOWN + 1)
    logits = (codes - TAIL_CENTRE) / TAIL_STEPS_PER_UNIT
    log_tails = -np.log1p(np.exp(-logits))
    log_tails[TAIL_ALL] = 0.0
    log_tails[[TAIL_NONE, TAIL_UNKNOWN]] = -np.inf
    return log_tails.astype(np.float32)


# The log tail of each byte.
_LOG_TAILS = _log_tails()
