"""The gate: whether a candidate drafter may take the incumbent's place.

Both are replayed on the same held-out traces, so what is judged is the difference per request:
the mean over the request's traces of candidate minus incumbent replay acceptance. Requests, not
positions, are the unit, because positions of one request rise and fall together.

The interval is Student's t on those differences. They are bounded and often exactly zero; for the
usual skew (most requests unchanged, some much better) t's lower bound errs to the safe side. It
cannot see a rare loss that no held-out request shows, which is why a minimum of requests is asked
for; nothing watches the channel once the candidate serves.

A candidate passes when all of this holds, and fails where it cannot be told:
  1. there are at least `min_requests` held-out requests, every figure within [0, 1];
  2. overall, the lower bound of the mean difference is above 0;
  3. in every domain the lower bound is above -margin (non-inferiority). Domains with fewer than
     `MIN_DOMAIN_REQUESTS` are pooled into one, and where even the pool is smaller than that, its
     plain mean must be above -margin: so few requests prove nothing, but a visible loss stops it.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from draftkeep.policies.student_t import Interval, mean_interval

CONFIDENCE = 0.95
MIN_DOMAIN_REQUESTS = 4
HIDDEN_DOMAIN = "(hidden)"
POOLED_DOMAINS = "(rare)"


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedScore:
    """Replay acceptance of both drafters on one held-out trace, each in [0, 1].

    `request` groups the choices of one request. Without an incumbent there are no
    scores, and the gate refuses.
    """

    request: bytes
    domain: str | None
    candidate: float
    incumbent: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """The decision and what it rests on.

    `reasons` is empty where admitted: `too_few_requests`, `bad_figure`, `not_better` or
    `loses_in:<domain>`. `overall` is None where there was nothing to judge. `domains` holds an
    interval per judged domain; `(rare)` stands for pooled ones. `speed_up` is the estimate that
    was handed in: it is recorded and never blocks.
    """

    admitted: bool
    reasons: tuple[str, ...]
    overall: Interval | None
    domains: Mapping[str, Interval]
    margin: float
    speed_up: float | None


def decide(
    scores: Sequence[PairedScore],
    *,
    margin: float,
    min_requests: int,
    speed_up: float | None = None,
) -> GateResult:
    """Judge a candidate on paired held-out scores. Never raises on odd data: it refuses."""
    reasons: list[str] = []
    overall: Interval | None = None
    domains: dict[str, Interval] = {}
    if not all(_sane(score) for score in scores) or not math.isfinite(margin):
        reasons.append("bad_figure")
    else:
        by_domain = _differences(scores)
        everything = [value for values in by_domain.values() for value in values]
        if len(everything) < max(min_requests, 2):
            reasons.append("too_few_requests")
        if everything:
            overall = mean_interval(everything, CONFIDENCE)
            if not overall.low > 0:
                reasons.append("not_better")
        domains = {
            name: mean_interval(values, CONFIDENCE) for name, values in _pooled(by_domain).items()
        }
        reasons += [f"loses_in:{name}" for name in _losing(domains, margin)]
    return GateResult(
        admitted=not reasons,
        reasons=tuple(reasons),
        overall=overall,
        domains=domains,
        margin=margin,
        speed_up=speed_up,
    )


def _sane(score: PairedScore) -> bool:
    return 0 <= score.candidate <= 1 and 0 <= score.incumbent <= 1


def _differences(scores: Iterable[PairedScore]) -> dict[str, list[float]]:
    requests: defaultdict[tuple[str, bytes], list[float]] = defaultdict(list)
    for score in scores:
        domain = HIDDEN_DOMAIN if score.domain is None else score.domain
        requests[domain, score.request].append(score.candidate - score.incumbent)
    domains: defaultdict[str, list[float]] = defaultdict(list)
    for (domain, _), values in sorted(requests.items()):
        domains[domain].append(fmean(values))
    return domains


def _pooled(by_domain: Mapping[str, list[float]]) -> dict[str, list[float]]:
    judged = {
        name: values for name, values in by_domain.items() if len(values) >= MIN_DOMAIN_REQUESTS
    }
    rare = [value for name in by_domain if name not in judged for value in by_domain[name]]
    return {**judged, POOLED_DOMAINS: rare} if rare else judged


def _losing(domains: Mapping[str, Interval], margin: float) -> list[str]:
    losing = []
    for name, interval in domains.items():
        enough = interval.count >= MIN_DOMAIN_REQUESTS
        if not (interval.low if enough else interval.mean) > -margin:
            losing.append(name)
    return losing
