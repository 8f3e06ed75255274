"""Metrics: what a node counts of its steps, requests and answers, as plain numbers.

Nothing here knows a tenant, and every set of labels is bounded: the domains are those of the
configuration, the drafters the few last ones, the routes those of the app.
"""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping
from copy import copy
from dataclasses import dataclass

from draftkeep.policies.tenant import UNKNOWN_DOMAIN
from draftkeep.serve.engine.request import Finish, Finished, StepReport

MAX_DRAFTERS = 8
OLDER = "older"
NO_DRAFTER = "none"
# Upper bounds of vLLM's histograms, so that one dashboard reads both.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5),
    *(10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)


def token_buckets(limit: int) -> tuple[float, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `limit`."""
    powers = (10**power for power in range(len(str(limit))))
    return tuple(float(m * power) for power in powers for m in (1, 2, 5) if m * power <= limit)


class Histogram:
    """Counts of observations by upper bound, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value; one equal to a bound is within it."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def copy(self) -> "Histogram":
        """What it holds at the moment."""
        other = Histogram(self.bounds)
        other.counts, other.sum = list(self.counts), self.sum
        return other


@dataclass(slots=True, kw_only=True)
class Drafting:
    """What became of the steps of one drafter in one domain.

    `steps` counts a pass once for every request in it, `drafts` those of them that had drafts.
    `drafted` drafts were proposed, the first `tested` of each step compared, `accepted` agreed.
    """

    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    tokens: int = 0

    def add(self, other: "Drafting") -> None:
        """Take over what another has counted."""
        self.steps += other.steps
        self.drafts += other.drafts
        self.drafted += other.drafted
        self.tested += other.tested
        self.accepted += other.accepted
        self.tokens += other.tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """Everything counted, at one moment. `drafting` is keyed by (drafter, domain).

    `accepted_at` says how often the draft at each position of a step was accepted. `histograms`
    are keyed as `Metrics.histograms` are.
    """

    drafting: Mapping[tuple[str, str], Drafting]
    accepted_at: tuple[int, ...]
    swaps: int
    finished: Mapping[Finish, int]
    http: Mapping[tuple[str, int], int]
    step_s: Mapping[str, float]
    histograms: Mapping[str, Histogram]

    @property
    def total(self) -> Drafting:
        """The sum over drafters and domains."""
        total = Drafting()
        for one in self.drafting.values():
            total.add(one)
        return total


class Metrics:
    """Counts as things happen; `counted` takes a consistent copy. Thread-safe and quick.

    `domains` are the labels that may appear, every other one counts as `unknown`. `names` says
    what to call drafters that have no digest worth showing. `lookahead` is how many positions are
    shown at least.
    """

    def __init__(
        self,
        *,
        domains: Iterable[str],
        names: Mapping[bytes, str],
        max_context: int,
        lookahead: int,
    ) -> None:
        self._domains = frozenset(domains) | {UNKNOWN_DOMAIN}
        self._names = {b"": NO_DRAFTER, **names}
        self._lock = threading.Lock()
        # By drafter, the one that drafted last at the end.
        self._drafting: dict[str, dict[str, Drafting]] = {}
        self._drafted_last = NO_DRAFTER
        self._swaps = 0
        # How many steps accepted exactly so many drafts.
        self._runs = [0] * (lookahead + 1)
        self._finished: Counter[Finish] = Counter()
        self._http: Counter[tuple[str, int]] = Counter()
        self._step_s = {"draft": 0.0, "verify": 0.0, "other": 0.0}
        self.histograms = {
            "time_to_first_token_seconds": Histogram(FIRST_TOKEN_S),
            "inter_token_latency_seconds": Histogram(BETWEEN_TOKENS_S),
            "e2e_request_latency_seconds": Histogram(REQUEST_S),
            "request_queue_time_seconds": Histogram(REQUEST_S),
            "request_prefill_time_seconds": Histogram(REQUEST_S),
            "request_decode_time_seconds": Histogram(REQUEST_S),
            "request_prompt_tokens": Histogram(token_buckets(max_context)),
            "request_generation_tokens": Histogram(token_buckets(max_context)),
        }
        self._first = self.histograms["time_to_first_token_seconds"]
        self._between = self.histograms["inter_token_latency_seconds"]

    def step(self, report: StepReport) -> None:
        """Count one step; called in the engine's thread."""
        with self._lock:
            domains = self._use(report.drafter)
            for row in report.rows:
                label = row.group if row.group in self._domains else UNKNOWN_DOMAIN
                one = domains.get(label)
                if one is None:
                    one = domains[label] = Drafting()
                one.steps += 1
                one.tokens += row.emitted
                if row.drafted:
                    one.drafts += 1
                    one.drafted += row.drafted
                    one.tested += row.tested
                    one.accepted += row.accepted
                    if row.accepted >= len(self._runs):
                        self._runs += [0] * (row.accepted + 1 - len(self._runs))
                    self._runs[row.accepted] += 1
                if row.emitted:
                    (self._first if row.first else self._between).observe(row.gap_s)
            self._step_s["draft"] += report.draft_s
            self._step_s["verify"] += report.verify_s
            self._step_s["other"] += report.total_s - report.draft_s - report.verify_s

    def finished(self, finished: Finished) -> None:
        """Count a request that ended by itself; called in the engine's thread."""
        values = {
            "e2e_request_latency_seconds": finished.finished_s - finished.submitted_s,
            "request_queue_time_seconds": finished.started_s - finished.submitted_s,
            "request_prefill_time_seconds": finished.first_s - finished.started_s,
            "request_decode_time_seconds": finished.finished_s - finished.first_s,
            "request_prompt_tokens": len(finished.request.prompt_ids),
            "request_generation_tokens": len(finished.output_ids_T),
        }
        with self._lock:
            self._finished[finished.finish] += 1
            for name, value in values.items():
                self.histograms[name].observe(value)

    def http(self, route: str, status: int) -> None:
        """Count one answer. `route` is a route's pattern, never a path as it was asked for."""
        with self._lock:
            self._http[route, status] += 1

    def label(self, drafter: bytes) -> str:
        """What a drafter of this digest is called."""
        return self._names.get(drafter) or drafter.hex()[:12]

    def counted(self) -> Counted:
        """Everything, at this moment."""
        with self._lock:
            runs = self._runs
            return Counted(
                drafting={
                    (drafter, domain): copy(one)
                    for drafter, domains in self._drafting.items()
                    for domain, one in domains.items()
                },
                accepted_at=tuple(sum(runs[at:]) for at in range(1, len(runs))),
                swaps=self._swaps,
                finished=dict(self._finished),
                http=dict(self._http),
                step_s=dict(self._step_s),
                histograms={name: one.copy() for name, one in self.histograms.items()},
            )

    def _use(self, drafter: bytes) -> dict[str, Drafting]:
        """The counts of a drafter by domain, the drafter's own or, once folded, made anew."""
        label = self.label(drafter)
        if label != NO_DRAFTER and label != self._drafted_last:
            self._swaps += self._drafted_last != NO_DRAFTER
            self._drafted_last = label
            self._drafting[label] = self._drafting.pop(label, {})
            self._fold()
        return self._drafting.setdefault(label, {})

    def _fold(self) -> None:
        named = (*self._names.values(), OLDER)
        versions = [label for label in self._drafting if label not in named]
        for label in versions[:-MAX_DRAFTERS]:
            older = self._drafting.setdefault(OLDER, {})
            for domain, one in self._drafting.pop(label).items():
                older.setdefault(domain, Drafting()).add(one)
