"""Class F: what is counted is what happened, worked out by hand."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine.request import RowStep, StepReport
from draftkeep.serve.metrics import Metrics
from draftkeep.store.models.target import TargetModel
from tests.faults.house import CHAT, COMPLETIONS, House
from tests.faults.plain import plain_output
from tests.serve.script import Script

PROMPT = (35, 40, 5, 46)
GREEDY = Sampling(temperature=0.0)
ENDLESS: dict[str, Any] = {"temperature": 0.8, "ignore_eos": True}


def _metrics() -> Metrics:
    return Metrics(domains=["sql"], names={}, max_context=128, lookahead=3)


def _run(lab: Any, wrong: tuple[int, ...], *, rule: str = "coupled") -> tuple[Metrics, Any]:
    """Twelve tokens in blocks of three drafts, wrong at these output indices."""
    metrics = _metrics()
    expected = plain_output(lab, PROMPT, GREEDY, tokens=12)
    plan = [(token + (at in wrong)) % 48 for at, token in enumerate(expected)]
    engine = lab.engine(
        floor=Script({"a": plan}), lookahead=3, on_step=metrics.step, verification=rule
    )
    lab.run(engine, [lab.request("a", PROMPT, max_tokens=12, group="sql")])
    return metrics, engine.stats()


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_run_worked_out_by_hand(lab: Any, rule: str) -> None:
    """vllm#42508: two projects, one pair, other numbers.

    Drafts 0, 1, 2 stand, and token 3 is the bonus. 4 stands, 5 falls. 6 falls. 7, 8, 9 stand, and
    10 is the bonus. 11 is the last and not drafted for.
    """
    metrics, stats = _run(lab, (5, 6), rule=rule)
    counted = metrics.counted()
    total = counted.total
    assert (total.steps, total.drafts, total.tokens) == (5, 4, 12)
    assert (total.drafted, total.tested, total.accepted) == (12, 9, 7)
    assert counted.accepted_at == (3, 2, 2)
    assert 1 + total.accepted / total.drafts == 1 + sum(counted.accepted_at) / total.drafts == 2.75
    assert (stats.row_steps, stats.output_tokens) == (5, 12)
    assert (stats.drafted, stats.tested, stats.accepted) == (12, 9, 7)


@pytest.mark.parametrize("wrong", [(), tuple(range(12)), (0,), (1, 4), (2, 3, 5)])
def test_acceptance_lies_between_nothing_and_all(lab: Any, wrong: tuple[int, ...]) -> None:
    """sgl#11572, #23530: a rate above 1, and one of 1/k where nothing was accepted, because the
    bonus token was counted on one side."""
    metrics, stats = _run(lab, wrong)
    total = metrics.counted().total
    assert 0 <= total.accepted <= total.tested <= total.drafted
    if not wrong:
        assert total.accepted == total.drafted == 9
    if len(wrong) == 12:
        assert (total.accepted, total.tested) == (0, 11)
    assert metrics.counted().total.accepted == stats.accepted


def _step(drafter: bytes, group: str, accepted: int) -> StepReport:
    row = RowStep(
        group=group,
        first=False,
        drafted=3,
        tested=min(accepted + 1, 3),
        accepted=accepted,
        emitted=accepted + 1,
        gap_s=0.1,
    )
    return StepReport(
        drafter=drafter, width=4, draft_s=0.0, verify_s=0.0, total_s=0.0, rows=(row, row)
    )


def test_two_series_add_up_position_by_position() -> None:
    """vllm-project/speculators#1095: of two series the later one overwrote the values by position,
    so that one plus their sum was no longer the mean length."""
    metrics = _metrics()
    for drafter, group, accepted in (
        (b"a" * 32, "sql", 3),
        (b"b" * 32, "x", 1),
        (b"a" * 32, "x", 0),
    ):
        metrics.step(_step(drafter, group, accepted))
    counted = metrics.counted()
    assert counted.accepted_at == (4, 2, 2)
    total = counted.total
    assert (total.drafts, total.accepted) == (6, 8)
    assert total.accepted == sum(counted.accepted_at)
    by_series = {key: one.accepted for key, one in counted.drafting.items()}
    assert sorted(by_series.values()) == [0, 2, 6]


def test_acceptance_is_counted_when_it_happens(lab: Any) -> None:
    """wejoncy/sfllm#33: live acceptance was 0 until a request ended."""
    metrics = _metrics()
    engine = lab.engine(drafter="copy", lookahead=3, on_step=metrics.step)
    engine.submit(lab.request("a", PROMPT, max_tokens=40).request)
    seen = []
    for _ in range(3):
        engine.step()
        seen.append((metrics.counted().total.accepted, engine.stats().accepted))
    assert seen == [(3, 3), (6, 6), (9, 9)]
    assert engine.stats().finished == 0


@pytest.mark.parametrize("how", ["stop token", "caller"])
@pytest.mark.parametrize("at", range(1, 12))
def test_drafts_behind_an_end_are_neither_drafted_nor_accepted(lab: Any, at: int, how: str) -> None:
    """sgl#11572, microsoft/onnxruntime-genai#2528: at the end of an output the counts were those of
    the whole block.

    Blocks of four of which all drafts stand, ended after every number of tokens.
    """
    metrics = _metrics()
    expected = plain_output(lab, PROMPT, GREEDY, tokens=12)
    engine = lab.engine(floor=Script({"a": expected}), lookahead=3, on_step=metrics.step)
    stops = (expected[at - 1],) if how == "stop token" else ()
    reply = lab.request(
        "a", PROMPT, max_tokens=12, sampling=Sampling(temperature=0.0, stop_ids=stops)
    )
    tell = reply.request.on_tokens

    def on_tokens(emission: Any) -> None:
        tell(emission)
        if how == "caller" and len(reply.tokens) >= at:
            engine.end("a", at)

    object.__setattr__(reply.request, "on_tokens", on_tokens)
    lab.run(engine, [reply])
    counted = metrics.counted()
    total, bonus = counted.total, at // 4
    assert total.tokens == engine.stats().output_tokens == at
    assert total.accepted == total.tested == total.drafted == at - bonus
    assert total.steps == -(-at // 4)
    assert total.drafts == total.steps - (at == 4 * bonus - 3)
    assert sum(counted.accepted_at) == total.accepted
    assert engine.stats().accepted == total.accepted


def _scrape(house: House) -> dict[tuple[str, ...], float]:
    """The value of every sample of `/metrics`, by its name and sorted labels."""
    headers = {"Authorization": "Bearer key-of-the-administrator"}
    response = house.station.http.get("/metrics", headers=headers)
    assert response.status_code == 200
    return {
        (sample.name, *(f"{k}={v}" for k, v in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def _named(samples: dict[tuple[str, ...], float], name: str) -> float:
    found = [value for key, value in samples.items() if key[0] == name]
    assert found, name
    return sum(found)


def _growth(
    before: dict[tuple[str, ...], float], after: dict[tuple[str, ...], float]
) -> Iterator[float]:
    for name in ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos"):
        full = f"vllm:spec_decode_num_{name}_total"
        yield _named(after, full) - _named(before, full)


def test_the_served_counts_are_those_of_the_configured_lookahead(house: House) -> None:
    """lcpp#12968, sgl#11572: fewer drafts than configured, and a rate above 1.

    25 tokens of a copy that drafts 5: four full blocks of 6, and one token that is not drafted for.
    """
    house.speculate(5)
    house.idle()
    before = _scrape(house)
    house.ask(COMPLETIONS, **ENDLESS, max_tokens=25)
    house.idle()
    after = _scrape(house)
    assert list(_growth(before, after)) == [4, 20, 20, 20]
    for position in range(5):
        key = ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "engine=0", "model_name=tiny")
        full = (*key, f"position={position}")
        assert after[full] - before[full] == 4


def test_the_served_names_are_vllms(house: House) -> None:
    """vllm#44487: histograms named off the pattern, which no dashboard finds."""
    house.ask(CHAT, **ENDLESS)
    names = {key[0] for key in _scrape(house)}
    histograms = (
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:e2e_request_latency_seconds",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_prompt_tokens",
        "vllm:request_generation_tokens",
    )
    for name in histograms:
        assert {f"{name}_bucket", f"{name}_sum", f"{name}_count"} <= names
    assert {
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:request_success_total",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:num_preemptions_total",
        "vllm:kv_cache_usage_perc",
    } <= names


def test_served_acceptance_is_counted_while_an_answer_is_written(
    stations: Callable[..., Any], gate: Any, tiny: TargetModel
) -> None:
    """wejoncy/sfllm#33 over HTTP: after two passes of an answer that is not finished."""
    house = House(stations(), tiny.model)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(house.ask, CHAT, **ENDLESS, max_tokens=40)
        gate.allow(2)
        house.station.wait_for(lambda: house.engine.stats().steps == 2)
        assert gate.waiting.wait(60)
        samples = _scrape(house)
        gate.open()
        asked.result()
    assert _named(samples, "vllm:spec_decode_num_accepted_tokens_total") == 6
    assert _named(samples, "vllm:num_requests_running") == 1
    assert _named(samples, "vllm:generation_tokens_total") == 8
