"""A second rendering of noise, processor and replay, written from docs/formats.md alone."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tests.formats.reader_body import F64, I64, Settings
from tests.formats.reader_cbor import require

U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]

_MASK = 2**64 - 1
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_STEPS = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)

ACCEPTED, REFUSED, UNTESTED = 1, 0, -1


def _product(factor: int, value: U64) -> tuple[U64, U64]:
    """High and low half of a 128-bit product."""
    low32, shift = np.uint64(2**32 - 1), np.uint64(32)
    f_low, f_high = np.uint64(factor & 0xFFFFFFFF), np.uint64(factor >> 32)
    v_low, v_high = value & low32, value >> shift
    middle = f_high * v_low + ((f_low * v_low) >> shift)
    other = f_low * v_high + (middle & low32)
    high = f_high * v_high + (middle >> shift) + (other >> shift)
    return high, np.uint64(factor) * value


def philox4x64_10(counter: tuple[U64, U64, U64, U64], key: tuple[int, int]) -> U64:
    """Ten rounds; one row of four lanes for each counter."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a_high, a_low = _product(_MULTIPLIERS[0], c0)
        b_high, b_low = _product(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = b_high ^ c1 ^ np.uint64(k0), b_low, a_high ^ c3 ^ np.uint64(k1), a_low
        k0, k1 = (k0 + _STEPS[0]) & _MASK, (k1 + _STEPS[1]) & _MASK
    return np.stack([c0, c1, c2, c3], axis=-1)


def gumbel(seed: int, choice: int, index: int, ids: I64) -> F64:
    """The noise of some token ids at one output index."""
    first = (ids // 4).astype(np.uint64)
    zero = np.zeros_like(first)
    lanes = philox4x64_10((first, zero + np.uint64(index), zero, zero), (seed, choice))
    x = lanes[np.arange(len(ids)), ids % 4]
    u = ((x >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return np.asarray(-np.log(-np.log(np.minimum(u, 1 - 2.0**-53))), np.float64)


def _penalised(logits: F32, prompt: Sequence[int], output: Sequence[int], s: Settings) -> F32:
    """The stages before the temperature, in float32."""
    row = np.array(logits, np.float32)
    for token, value in s.bias:
        row[token] += np.float32(value)
    if len(output) < s.min_tokens:
        row[[token for token in s.eos_ids + s.stop_ids if token < len(row)]] = -np.inf
    if s.repetition != 1:
        seen = np.unique(np.array([*prompt, *output], np.int64))
        factor = np.float32(s.repetition)
        row[seen] = np.where(row[seen] > 0, row[seen] / factor, row[seen] * factor)
    ids, counts = np.unique(np.array(output, np.int64), return_counts=True)
    if s.presence != 0:
        row[ids] -= np.float32(s.presence)
    if s.frequency != 0:
        row[ids] -= np.float32(s.frequency) * counts.astype(np.float32)
    return row


def process(logits: F32, prompt: Sequence[int], output: Sequence[int], s: Settings) -> F64:
    """Scores of one position; at temperature 0 those of the stage before."""
    penalised = _penalised(logits, prompt, output, s)
    score: F64 = penalised.astype(np.float64)
    if s.temperature == 0 or not np.isfinite(score.max()):
        return score
    with np.errstate(over="ignore"):
        score = (score - score.max()) / s.temperature
    if s.min_p != 0:
        score[score < min(math.log(s.min_p), 0)] = -np.inf
    order = np.argsort(-score, kind="stable")
    if s.top_k != 0:
        score[order[s.top_k :]] = -np.inf
    if s.top_p != 1:
        mass = np.cumsum(np.exp(score[order]))
        kept = int(np.searchsorted(mass, s.top_p * mass[-1], side="left")) + 1
        score[order[kept:]] = -np.inf
    return score


def draw(score: F64, settings: Settings, seed: int | None, choice: int, index: int) -> int:
    """The token of a row of scores: with noise, or the argmax at temperature 0."""
    if settings.temperature == 0:
        return int(np.argmax(score))
    require(seed is not None, "noise without a seed")
    noise = gumbel(seed or 0, choice, index, np.arange(len(score)))
    return int(np.argmax(score + noise))


@dataclass(frozen=True)
class Logged:
    """What replay needs of a trace: the whole prompt, served output, and how it was drawn."""

    prompt: Sequence[int]
    output: Sequence[int]
    settings: Settings
    seed: int | None
    choice: int
    processed_logp: npt.NDArray[np.floating] | None = None


def ratio(score: F64, token: int, logp: float) -> float:
    """min(1, q/p) of a token, from the drafter's scores and the stored log p."""
    mass = np.exp(score - score.max())
    q, p = float(mass[token] / mass.sum()), math.exp(logp)
    if q == 0:
        return REFUSED
    return min(1.0, q / p) if p else ACCEPTED


def replay(logged: Logged, drafter_logits: Sequence[F32 | None]) -> list[float]:
    """a_t of every output position, from the drafter's logits before the processor."""
    outcome: list[float] = []
    for t, logits in enumerate(drafter_logits):
        outcome.append(UNTESTED)
        if logits is None:
            continue
        score = process(logits, logged.prompt, logged.output[:t], logged.settings)
        if not np.isfinite(score.max()):
            continue
        if logged.processed_logp is not None and logged.settings.temperature != 0:
            require(logged.seed is None, "a seed beside the processed log p")
            outcome[t] = ratio(score, logged.output[t], float(logged.processed_logp[t]))
        else:
            proposed = draw(score, logged.settings, logged.seed, logged.choice, t)
            outcome[t] = ACCEPTED if proposed == logged.output[t] else REFUSED
    return outcome


def replay_acceptance(outcome: Sequence[float]) -> float:
    """The mean over the proposals."""
    tested = [a for a in outcome if a != UNTESTED]
    return sum(tested) / len(tested)


def walk(outcome: Sequence[float], lookahead: int, budget: int | None) -> tuple[float, float]:
    """Accepted and tested drafts, expected, of a live service's walk (budget None: no end)."""
    reach = max((t + 1 for t, a in enumerate(outcome) if a != UNTESTED), default=0)
    # What is still to come where a step begins at t; filled from the end.
    ahead = [(0.0, 0.0)] * (reach + 1)
    for t in reversed(range(reach)):
        room = lookahead if budget is None else min(lookahead, budget - t - 1)
        drafted = outcome[t : min(t + room, reach)]
        accepted, tested, alive = 0.0, 0.0, 1.0
        for n, a in enumerate(drafted):
            kept, later = alive * max(a, 0), ahead[t + n + 1]
            tested += alive + (alive - kept) * later[1]
            accepted += kept + (alive - kept) * later[0]
            alive = kept
        later = ahead[min(t + len(drafted) + 1, reach)]
        ahead[t] = (accepted + alive * later[0], tested + alive * later[1])
    return ahead[0]
