"""What is kept of a request, and what is not: the log is opened as a distillation job would."""

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from draftkeep.ingest.trace import How
from draftkeep.policies.names import request_id


def test_the_log_holds_what_was_answered(
    stations: Callable[..., Any], publish: Callable[..., bytes]
) -> None:
    station = stations()
    digest = publish(station, vocab=512)
    station.node.registry.set_channel("everyone", "stable", digest, at_s=0.0)
    station.node.follower.poll()
    fields = {"temperature": 0.7, "top_p": 0.9, "seed": 41, "max_tokens": 20, "min_tokens": 9}
    answer = station.chat(
        "How many rows?", safety_identifier="someone", metadata={"domain": "sql"}, **fields
    )
    ((header, trace),) = station.captured()
    tokenizer = station.node.target.tokenizer
    content = answer["choices"][0]["message"]["content"]
    assert tokenizer.decode(trace.output_ids_T, skip_special_tokens=True) == content
    assert trace.positions == header.positions == answer["usage"]["completion_tokens"]
    assert len(trace.prompt_ids_P) == header.prompt_tokens == answer["usage"]["prompt_tokens"]
    assert tokenizer.decode(trace.prompt_ids_P).endswith(
        "How many rows?<|im_end|>\n<|im_start|>assistant\n"
    )
    lookup_key = station.node._keyring.lookup_key("acme")
    response = bytes.fromhex(answer["id"].removeprefix("chatcmpl-"))
    assert header.request_id == request_id(lookup_key, response)
    assert (header.tenant, header.domain, header.consent) == ("acme", "sql", 1)
    assert header.subject_kind == 1
    sampling = trace.sampling
    assert (sampling.temperature, sampling.top_p, sampling.min_tokens) == (0.7, 0.9, 9)
    assert (trace.seed, trace.choice) == (41, 0)
    assert trace.chat_template_hash == station.node.target.chat_template_hash
    assert {run.drafter for run in trace.drafters} == {digest}
    assert How.ACCEPTED in trace.how_T


def test_an_unseeded_request_is_captured_with_the_seed_that_reproduces_it(
    stations: Callable[..., Any],
) -> None:
    station = stations()
    first = station.chat(max_tokens=20, ignore_eos=True)
    ((_, trace),) = station.captured()
    assert "seed" not in str(first)
    again = station.chat(max_tokens=20, ignore_eos=True, seed=trace.seed)
    assert again["choices"] == first["choices"]


def test_a_stream_is_captured_once_it_was_delivered(stations: Callable[..., Any]) -> None:
    station = stations()
    body = {"model": "tiny", "prompt": "How many", "max_tokens": 7, "stream": True, "seed": 1}
    events = station.stream("/v1/completions", body)
    ((header, trace),) = station.captured()
    text = "".join(event["choices"][0]["text"] for event in events)
    decoded = station.node.target.tokenizer.decode(trace.output_ids_T, skip_special_tokens=True)
    assert decoded == text
    assert header.subject_kind == 0


def test_a_long_prompt_is_cut_to_its_last_tokens(stations: Callable[..., Any]) -> None:
    station = stations(capture={"context_tokens": 8, "k": 5})
    ids = [10 + number for number in range(30)]
    station.post("/v1/completions", {"model": "tiny", "prompt": ids, "max_tokens": 2})
    ((header, trace),) = station.captured()
    assert trace.prompt_ids_P.tolist() == ids[-8:]
    assert trace.prompt_cut
    assert header.prompt_tokens == 8
    assert np.all(trace.topk.k_T == 5)


@pytest.mark.parametrize(
    ("tenant", "store", "reason"),
    [
        ("acme", None, None),
        ("acme", True, None),
        ("acme", False, "store_false"),
        ("shy", True, None),
        ("shy", None, "no_consent"),
        ("shy", False, "store_false"),
        ("open", True, "never"),
        ("open", None, "never"),
        ("open", False, "store_false"),
    ],
)
def test_consent_is_honoured(
    stations: Callable[..., Any], tenant: str, store: bool | None, reason: str | None
) -> None:
    station = stations()
    fields = {} if store is None else {"store": store}
    station.chat(tenant=tenant, max_tokens=3, **fields)
    stats = station.capture_stats()
    assert stats["declined"] == ({reason: 1} if reason else {})
    assert stats["drops"] == {}
    assert [header.tenant for header, _ in station.captured()] == ([] if reason else [tenant])


@pytest.mark.parametrize(("rate", "kept"), [(0.0, 0), (1.0, 12)])
def test_the_sampling_rate_is_honoured(
    stations: Callable[..., Any], rate: float, kept: int
) -> None:
    station = stations(capture={"sampling_rate": rate})
    for _ in range(12):
        station.chat(max_tokens=1)
    assert len(station.captured()) == kept
    assert station.capture_stats()["declined"].get("not_sampled", 0) == 12 - kept


def test_nothing_is_collected_where_nothing_may_be_kept(
    stations: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    station = stations()
    finished: list[Any] = []
    monkeypatch.setattr(station.node.groups, "add", finished.append)
    station.chat(max_tokens=3, store=False)
    station.chat(max_tokens=3)
    assert len(station.captured()) == 1
    assert [one.ids_TK.shape[1] for one in finished] == [0, 32]


def test_capture_can_be_switched_off(stations: Callable[..., Any]) -> None:
    station = stations(capture={"enabled": False})
    station.chat(max_tokens=2, store=True)
    assert station.capture_stats() == {
        "acknowledged": 0,
        "declined": {"disabled": 1},
        "drops": {},
        "pending": 0,
        "cut": 0,
    }
    assert not (station.config.state_dir / "log").exists()


def test_an_erasure_reaches_requests_under_way(stations: Callable[..., Any], gate: Any) -> None:
    station = stations()
    under_way = threading.Thread(
        target=station.chat, kwargs={"safety_identifier": "someone", "max_tokens": 4}
    )
    under_way.start()
    assert gate.waiting.wait(60)
    body = {"tenant": "acme", "subject": "someone"}
    assert station.admin("POST", "/admin/erase", body).status_code == 200
    gate.open()
    under_way.join()
    assert station.capture_stats()["drops"] == {"no_key": 1}
    assert station.captured() == []
    later_s = station.node.now_s() + 2
    station.node.now_s = lambda: later_s
    station.chat(safety_identifier="someone", max_tokens=4)
    assert len(station.captured()) == 1
