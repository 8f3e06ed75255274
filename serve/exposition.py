"""What `GET /metrics` answers: a node's counts in Prometheus' text form.

Names, types and labels of vLLM where it has the metric, ours beside them under `draftkeep_`. A
drafter's version is a label of ours alone: on vLLM's counters it would break sums over them.
Nothing has a tenant's name: acceptance by tenant is itself told about people.
"""

import math
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from draftkeep.serve.capture import CaptureStats
from draftkeep.serve.engine.lookahead import SpeculationState
from draftkeep.serve.engine.request import Finish
from draftkeep.serve.engine.stats import EngineStats
from draftkeep.serve.metrics import Counted, Histogram, Metrics
from draftkeep.serve.outbox import ForwardingStats
from draftkeep.serve.stats import NodeStats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ENGINE = "0"
_BY_DRAFTER = {
    "steps": "Passes of the target, once for every request in them",
    "drafted": "Draft tokens proposed",
    "tested": "Draft tokens compared with the target's own",
    "accepted": "Draft tokens equal to the target's own",
    "tokens": "Tokens generated",
}
_HISTOGRAMS = {
    "time_to_first_token_seconds": "From submission to the first token",
    "inter_token_latency_seconds": "From one delivery of a request to its next",
    "e2e_request_latency_seconds": "From submission to the end",
    "request_queue_time_seconds": "From submission to a slot",
    "request_prefill_time_seconds": "From a slot to the first token",
    "request_decode_time_seconds": "From the first token to the end",
    "request_prompt_tokens": "Tokens of a finished request's prompt",
    "request_generation_tokens": "Tokens of a finished request's answer",
}


class Exposition(Collector):
    """Renders one node. `state` is `Node.stats`; both are asked at every scrape.

    `cache` are the labels of the cache's shape. The registry is its own, so two nodes of one
    process do not meet.
    """

    def __init__(
        self,
        metrics: Metrics,
        state: Callable[[], NodeStats],
        *,
        model_name: str,
        cache: Mapping[str, str],
    ) -> None:
        self._metrics = metrics
        self._state = state
        self._vllm = {"model_name": model_name, "engine": _ENGINE}
        self._cache = {"engine": _ENGINE, **cache}
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        """The page."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing beforehand, so that registering does not ask the node yet."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Every family of metrics."""
        counted, state = self._metrics.counted(), self._state()
        yield from self._vllm_speculation(counted)
        yield from self._vllm_requests(counted, state.engine)
        yield from self._vllm_gauges(state.engine)
        for name, help_text in _HISTOGRAMS.items():
            yield self._histogram(f"vllm:{name}", help_text, counted.histograms[name])
        yield from _drafters(counted, state, self._metrics.label)
        yield from _speculation(state.engine.speculation)
        yield from _failures(state.engine)
        yield from _capture(state.capture)
        yield _gauge(
            "draftkeep_catalog_up",
            "1 while the node can read the catalog",
            [({}, int(state.catalog_up))],
        )
        if state.forwarding is not None:
            yield from _forwarding(state.forwarding)
        yield from _answers(counted)

    def _vllm_speculation(self, counted: Counted) -> Iterable[Metric]:
        total = counted.total
        yield self._count("spec_decode_num_drafts", "Steps of a request with drafts", total.drafts)
        yield self._count("spec_decode_num_draft_tokens", "Draft tokens proposed", total.drafted)
        yield self._count(
            "spec_decode_num_accepted_tokens", "Draft tokens accepted", total.accepted
        )
        yield _counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their position in the step",
            [
                ({**self._vllm, "position": str(position)}, count)
                for position, count in enumerate(counted.accepted_at)
            ],
        )

    def _vllm_requests(self, counted: Counted, engine: EngineStats) -> Iterable[Metric]:
        yield self._count("prompt_tokens", "Prompt tokens read", engine.prompt_tokens)
        yield self._count("generation_tokens", "Tokens generated", counted.total.tokens)
        yield self._count("num_preemptions", "Requests that gave up a slot", engine.preempted)
        ends = {
            "stop": counted.finished.get(Finish.STOP, 0),
            "length": counted.finished.get(Finish.LENGTH, 0),
            "abort": engine.cancelled,
            "error": engine.failed,
        }
        yield _counter(
            "vllm:request_success",
            "Requests that ended, by how",
            [({**self._vllm, "finished_reason": reason}, count) for reason, count in ends.items()],
        )

    def _vllm_gauges(self, engine: EngineStats) -> Iterable[Metric]:
        for name, help_text, value in (
            ("num_requests_running", "Requests in a slot", engine.running),
            ("num_requests_waiting", "Requests waiting for a slot", engine.waiting),
            ("kv_cache_usage_perc", "Used share of the cache, 0 to 1", engine.kv_used_share),
        ):
            yield _gauge(f"vllm:{name}", help_text, [(self._vllm, value)])
        yield _gauge("vllm:cache_config_info", "A slot is one block", [(self._cache, 1)])

    def _count(self, name: str, help_text: str, value: float) -> Metric:
        return _counter(f"vllm:{name}", help_text, [(self._vllm, value)])

    def _histogram(self, name: str, help_text: str, histogram: Histogram) -> Metric:
        family = HistogramMetricFamily(name, help_text, labels=list(self._vllm))
        below, buckets = 0, []
        for bound, count in zip((*histogram.bounds, math.inf), histogram.counts, strict=True):
            below += count
            buckets.append(("+Inf" if math.isinf(bound) else str(bound), float(below)))
        family.add_metric(list(self._vllm.values()), buckets, histogram.sum)
        return family


def _drafters(
    counted: Counted, state: NodeStats, label: Callable[[bytes], str]
) -> Iterable[Metric]:
    for field, help_text in _BY_DRAFTER.items():
        yield _counter(
            f"draftkeep_drafter_{field}",
            help_text,
            [
                ({"drafter": drafter, "domain": domain}, getattr(one, field))
                for (drafter, domain), one in counted.drafting.items()
            ],
        )
    current, lost = state.engine.drafter, state.engine.drafter_lost
    yield _gauge(
        "draftkeep_drafter_info",
        "1 for the drafter in use",
        [({"drafter": label(current)}, 1)],
    )
    yield _counter(
        "draftkeep_drafter_swaps", "Times that another drafter took over", [({}, counted.swaps)]
    )
    yield _gauge(
        "draftkeep_drafter_lost",
        "1 while the drafter last loaded has been given up",
        [({}, int(bool(lost)))],
    )


def _speculation(speculation: SpeculationState) -> Iterable[Metric]:
    lookahead, speedup = speculation.lookahead, speculation.est_speedup
    yield _gauge("draftkeep_speculation_lookahead", "Drafts planned a step", [({}, lookahead)])
    yield _gauge("draftkeep_speculation_on", "1 while drafting", [({}, int(lookahead > 0))])
    yield _gauge(
        "draftkeep_speculation_est_speedup",
        "Expected tokens/s over the target's alone",
        [({}, speedup)] if math.isfinite(speedup) else [],
    )


def _failures(engine: EngineStats) -> Iterable[Metric]:
    failures = {
        "request": engine.failed,
        "capture": engine.capture_failed,
        "callback": engine.callback_failed,
        "drafter": engine.drafter_failed,
    }
    yield _counter(
        "draftkeep_engine_failures",
        "What the engine survived, by part",
        [({"part": part}, count) for part, count in failures.items()],
    )


def _capture(capture: CaptureStats) -> Iterable[Metric]:
    yield _counter(
        "draftkeep_capture_acknowledged",
        "Traces the log has taken",
        [({}, capture.acknowledged)],
    )
    yield _counter(
        "draftkeep_capture_declined",
        "Choices that were not to be captured, by reason",
        [({"reason": reason}, count) for reason, count in capture.declined.items()],
    )
    yield _counter(
        "draftkeep_capture_dropped",
        "Traces that were to be kept and were lost, by reason",
        [({"reason": reason}, count) for reason, count in capture.drops.items()],
    )
    yield _counter(
        "draftkeep_capture_cut",
        "Traces sealed without some of their branches or positions",
        [({}, capture.cut)],
    )
    yield _gauge(
        "draftkeep_capture_pending",
        "Admitted choices whose trace is neither taken nor dropped yet",
        [({}, capture.pending)],
    )


def _forwarding(stats: ForwardingStats) -> Iterable[Metric]:
    forward = stats.forward
    for name, help_text, count in (
        ("forwarded_records", "Traces that Kafka has acknowledged", forward.sent_records),
        ("forwarded_bytes", "Bytes that Kafka has acknowledged", forward.sent_bytes),
        ("forward_failures", "Attempts that Kafka did not acknowledge", forward.failures),
    ):
        yield _counter(f"draftkeep_{name}", help_text, [({}, count)])
    for name, help_text, value in (
        ("spool_records", "Traces that wait for Kafka", forward.waiting),
        ("spool_bytes", "What the node's log occupies", forward.log_bytes),
        ("spool_cap_bytes", "What it may occupy", stats.cap_bytes),
        ("spool_oldest_seconds", "Age of the oldest trace held up", forward.oldest_s),
    ):
        yield _gauge(f"draftkeep_{name}", help_text, [({}, value)])


def _answers(counted: Counted) -> Iterable[Metric]:
    yield _counter(
        "draftkeep_http_responses",
        "Answers, by route and status",
        [
            ({"route": route, "status": str(status)}, count)
            for (route, status), count in counted.http.items()
        ],
    )
    yield _counter(
        "draftkeep_step_seconds",
        "Time of decoding steps, by part",
        [({"part": part}, seconds) for part, seconds in counted.step_s.items()],
    )


_Samples = Iterable[tuple[Mapping[str, str], float]]


def _counter(name: str, help_text: str, samples: _Samples) -> Metric:
    return _fill(CounterMetricFamily(name, help_text), f"{name}_total", samples)


def _gauge(name: str, help_text: str, samples: _Samples) -> Metric:
    return _fill(GaugeMetricFamily(name, help_text), name, samples)


def _fill(family: Metric, sample_name: str, samples: _Samples) -> Metric:
    for labels, value in samples:
        family.add_sample(sample_name, dict(labels), float(value))
    return family
