"""Metrics: sums that agree whatever they are split by, and no label that grows without bound."""

import hashlib
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from draftkeep.serve.capture import CaptureStats
from draftkeep.serve.engine.request import RowStep, StepReport
from draftkeep.serve.exposition import Exposition
from draftkeep.serve.metrics import MAX_DRAFTERS, Histogram, Metrics, token_buckets
from draftkeep.serve.stats import NodeStats
from tests.serve.lab import Lab

DOMAINS = ("sql", "code")
NGRAM = hashlib.sha256(b"ngram").digest()
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def metrics() -> Metrics:
    return Metrics(domains=DOMAINS, names={NGRAM: "ngram"}, max_context=128, lookahead=3)


def digest(number: int) -> bytes:
    """The digest of a made-up drafter; 0 is none and 1 the n-gram floor."""
    return (b"", NGRAM)[number] if number < 2 else hashlib.sha256(bytes([number])).digest()


def row(group: str, drafted: int, accepted: int, *, gap_s: float = 0.1) -> RowStep:
    """A step that ends in a token of the target's own."""
    return RowStep(
        group=group,
        first=False,
        drafted=drafted,
        tested=min(drafted, accepted + 1),
        accepted=accepted,
        emitted=accepted + 1,
        gap_s=gap_s,
    )


def step(drafter: bytes, *rows: RowStep) -> StepReport:
    return StepReport(
        drafter=drafter, width=4, draft_s=0.01, verify_s=0.03, total_s=0.05, rows=rows
    )


@cache
def idle() -> NodeStats:
    """A node that has done nothing yet."""
    engine = Lab().engine().stats()
    return NodeStats(
        target=bytes(32),
        engine=replace(engine, speculation=replace(engine.speculation, est_speedup=float("nan"))),
        groups={},
        tenants={},
        capture=CaptureStats(acknowledged=0, declined={}, drops={}, pending=0, cut=0),
        catalog_up=True,
        forwarding=None,
    )


def scrape(counts: Metrics, state: NodeStats | None = None) -> Samples:
    """Every sample of the page; no value may be other than a finite number."""
    page = Exposition(
        counts, lambda: state or idle(), model_name="tiny", cache={"block_size": "128"}
    )
    samples = {}
    for family in text_string_to_metric_families(page.render().decode()):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in samples
            assert 0 <= sample.value < float("inf")
            samples[key] = sample.value
    return samples


def total(samples: Samples, name: str) -> float:
    return sum(value for (known, _), value in samples.items() if known == name)


def labels(samples: Samples, name: str, label: str) -> set[str]:
    return {dict(pairs)[label] for (known, pairs) in samples if known == name}


COUNTERS = ("drafts", "draft_tokens", "accepted_tokens")
ROWS = st.tuples(
    st.sampled_from([*DOMAINS, "odd", "unknown"]), st.integers(0, 5), st.integers(0, 5)
).map(lambda drawn: row(drawn[0], max(drawn[1:]), min(drawn[1:])))
STEPS = st.lists(st.tuples(st.integers(0, 30), st.lists(ROWS, max_size=4)), max_size=40)


@given(STEPS)
def test_sums_agree_and_only_grow(steps: list[tuple[int, list[RowStep]]]) -> None:
    counts = metrics()
    before: dict[str, float] = {}
    rows: list[RowStep] = []
    for number, drawn in steps:
        # Nothing is drafted where there is no drafter.
        drawn = [row(one.group, 0, 0) for one in drawn] if number == 0 else drawn
        rows += drawn
        counts.step(step(digest(number), *drawn))
        samples = scrape(counts)
        after = {
            name: total(samples, f"vllm:spec_decode_num_{name}_total")
            for name in (*COUNTERS, "accepted_tokens_per_pos")
        }
        after["tokens"] = total(samples, "vllm:generation_tokens_total")
        assert all(after[name] >= value for name, value in before.items())
        before = after
    samples = scrape(counts)
    ours = {
        name: total(samples, f"draftkeep_drafter_{name}_total")
        for name in ("steps", "drafted", "tested", "accepted", "tokens")
    }
    drafts = sum(one.drafted > 0 for one in rows)
    assert ours == {
        "steps": len(rows),
        "drafted": sum(one.drafted for one in rows),
        "tested": sum(one.tested for one in rows),
        "accepted": sum(one.accepted for one in rows),
        "tokens": sum(one.emitted for one in rows),
    }
    if steps:
        assert before["drafts"] == drafts
        assert before["draft_tokens"] == ours["drafted"]
        assert before["accepted_tokens"] == before["accepted_tokens_per_pos"] == ours["accepted"]
        assert before["tokens"] == ours["tokens"]
    assert ours["accepted"] <= ours["tested"] <= ours["drafted"]


def test_a_run_counted_by_hand() -> None:
    """Three drafts a step of which 3, 1 and 0 are accepted: mean length 1 + 4/3."""
    counts = metrics()
    for accepted in (3, 1, 0):
        counts.step(step(digest(9), row("sql", 3, accepted), row("code", 0, 0)))
    samples = scrape(counts)
    vllm = {("model_name", "tiny"), ("engine", "0")}
    by_position = [
        samples[
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            frozenset({*vllm, ("position", str(position))}),
        ]
        for position in range(3)
    ]
    assert by_position == [2, 1, 1]
    drafts = samples["vllm:spec_decode_num_drafts_total", frozenset(vllm)]
    accepted_tokens = samples["vllm:spec_decode_num_accepted_tokens_total", frozenset(vllm)]
    assert 1 + sum(by_position) / drafts == 1 + accepted_tokens / drafts == pytest.approx(7 / 3)
    name = {("drafter", digest(9).hex()[:12])}
    by_domain = {
        domain: [
            samples[f"draftkeep_drafter_{field}_total", frozenset({*name, ("domain", domain)})]
            for field in ("steps", "drafted", "tested", "accepted", "tokens")
        ]
        for domain in DOMAINS
    }
    assert by_domain == {"sql": [3, 9, 6, 4, 7], "code": [3, 0, 0, 0, 3]}
    assert total(samples, "vllm:inter_token_latency_seconds_count") == 6
    assert total(samples, "vllm:inter_token_latency_seconds_sum") == pytest.approx(0.6)
    parts = {
        part: samples["draftkeep_step_seconds_total", frozenset({("part", part)})]
        for part in ("draft", "verify", "other")
    }
    assert parts == pytest.approx({"draft": 0.03, "verify": 0.09, "other": 0.03})


def test_nothing_drafted_is_no_rate_and_no_nan() -> None:
    counts = metrics()
    counts.step(step(b"", row("sql", 0, 0)))
    samples = scrape(counts)
    assert total(samples, "vllm:spec_decode_num_drafts_total") == 0
    assert total(samples, "draftkeep_speculation_est_speedup") == 0
    assert not [name for name, _ in samples if name == "draftkeep_speculation_est_speedup"]


def test_a_thousand_odd_labels_make_no_more_series() -> None:
    counts, sizes = metrics(), []
    for number in range(1000):
        drafter = hashlib.sha256(number.to_bytes(4, "big")).digest()
        groups = (f"odd {number}", DOMAINS[number % 2])
        counts.step(step(drafter, *(row(group, 3, 1) for group in groups)))
        if number % 100 == 99:
            sizes.append(len(scrape(counts)))
    assert len(set(sizes)) == 1
    samples = scrape(counts)
    name = "draftkeep_drafter_accepted_total"
    assert labels(samples, name, "domain") == {*DOMAINS, "unknown"}
    shown = labels(samples, name, "drafter")
    last = {
        hashlib.sha256(number.to_bytes(4, "big")).hexdigest()[:12]
        for number in range(1000 - MAX_DRAFTERS, 1000)
    }
    assert shown == last | {"older"}
    assert total(samples, name) == 2000
    assert total(samples, "draftkeep_drafter_swaps_total") == 999


def test_the_floor_and_no_drafter_are_never_folded_away() -> None:
    counts = metrics()
    for number in range(40):
        counts.step(step(digest(number), row("sql", 0, 0)))
    shown = labels(scrape(counts), "draftkeep_drafter_steps_total", "drafter")
    assert {"none", "ngram", "older"} <= shown
    assert len(shown) == 3 + MAX_DRAFTERS


def test_steps_without_a_drafter_between_are_no_swap() -> None:
    counts = metrics()
    for number in (0, 5, 0, 5, 6, 0, 6, 5):
        counts.step(step(digest(number), row("sql", 0, 0)))
    assert total(scrape(counts), "draftkeep_drafter_swaps_total") == 2


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(1, [1]), (10, [1, 2, 5, 10]), (128, [1, 2, 5, 10, 20, 50, 100])],
)
def test_token_buckets_end_at_the_context(limit: int, expected: list[float]) -> None:
    assert list(token_buckets(limit)) == expected


@given(st.lists(st.floats(0, 1e4), max_size=50))
def test_a_histogram_holds_what_is_at_most_its_bound(values: list[float]) -> None:
    histogram = Histogram((0.5, 1.0, 100.0))
    for value in values:
        histogram.observe(value)
    below = 0
    for bound, count in zip((0.5, 1.0, 100.0, float("inf")), histogram.counts, strict=True):
        below += count
        assert below == sum(value <= bound for value in values)
    assert histogram.sum == pytest.approx(sum(values))


@pytest.mark.parametrize(
    ("part", "change", "name", "value"),
    [
        ("engine", {"preempted": 3}, "vllm:num_preemptions_total", 3),
        ("engine", {"running": 2}, "vllm:num_requests_running", 2),
        ("engine", {"kv_used_share": 0.5}, "vllm:kv_cache_usage_perc", 0.5),
        ("engine", {"drafter_lost": b"x"}, "draftkeep_drafter_lost", 1),
        ("speculation", {"lookahead": 4}, "draftkeep_speculation_on", 1),
        ("capture", {"declined": {"never": 4}}, "draftkeep_capture_declined_total", 4),
        ("capture", {"drops": {"log_full": 7}}, "draftkeep_capture_dropped_total", 7),
        ("capture", {"cut": 5}, "draftkeep_capture_cut_total", 5),
    ],
)
def test_the_state_of_the_moment_is_shown(
    part: str, change: dict[str, Any], name: str, value: float
) -> None:
    state = idle()
    if part == "capture":
        state = replace(state, capture=replace(state.capture, **change))
    elif part == "engine":
        state = replace(state, engine=replace(state.engine, **change))
    else:
        speculation = replace(state.engine.speculation, **change)
        state = replace(state, engine=replace(state.engine, speculation=speculation))
    assert total(scrape(metrics(), state), name) == value
