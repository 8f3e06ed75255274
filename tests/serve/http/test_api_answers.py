"""Answers of both routes, whole and streamed: shape, text, usage, and what a seed fixes."""

from collections.abc import Callable
from typing import Any

import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "How many rows has the table orders?"}]


def body_for(path: str, **fields: Any) -> dict[str, Any]:
    prompt = {"messages": QUESTION} if path == CHAT else {"prompt": "How many rows"}
    return {"model": "tiny", "seed": 5, "max_tokens": 12, **prompt, **fields}


def pieces(events: list[Any]) -> list[str]:
    texts = []
    for event in events:
        for choice in event["choices"]:
            texts.append(
                choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            )
    return texts


def test_chat_answer_has_openais_shape(station: Any) -> None:
    answer = station.chat(max_tokens=5, temperature=0, min_tokens=5)
    assert answer["id"].startswith("chatcmpl-")
    assert len(bytes.fromhex(answer["id"].removeprefix("chatcmpl-"))) == 16
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    fingerprint = station.node.target.target_fingerprint.hex()
    assert answer["system_fingerprint"] == f"fp_{fingerprint[:16]}"
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    usage = answer["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["total_tokens"] == usage["prompt_tokens"] + 5


def test_completion_answer_has_openais_shape(station: Any) -> None:
    answer = station.post(COMPLETIONS, body_for(COMPLETIONS)).json()
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert isinstance(answer["choices"][0]["text"], str)


def test_a_completion_takes_token_ids(station: Any) -> None:
    text = "How many rows"
    ids = station.node.target.tokenizer(text)["input_ids"]
    one = station.post(COMPLETIONS, body_for(COMPLETIONS, prompt=text)).json()
    other = station.post(COMPLETIONS, body_for(COMPLETIONS, prompt=ids)).json()
    assert one["choices"] == other["choices"]
    assert one["usage"] == other["usage"]


def test_a_completion_is_short_unless_asked_otherwise(station: Any) -> None:
    body = body_for(COMPLETIONS, max_tokens=None, ignore_eos=True)
    usage = station.post(COMPLETIONS, body).json()["usage"]
    assert usage["completion_tokens"] == 16


def test_a_chat_answer_ends_by_itself_with_stop(station: Any) -> None:
    answer = station.chat(temperature=0, max_tokens=200)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert "<|im_end|>" not in answer["choices"][0]["message"]["content"]


def test_content_may_be_a_list_of_text_parts(station: Any) -> None:
    parts = [{"type": "text", "text": "How many "}, {"type": "text", "text": "rows?"}]
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": parts}]
    joined = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How many rows?"},
    ]
    one = station.post(CHAT, body_for(CHAT, messages=messages)).json()
    assert one["choices"] == station.post(CHAT, body_for(CHAT, messages=joined)).json()["choices"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("with_usage", [False, True])
def test_a_stream_says_what_the_whole_answer_says(
    station: Any, path: str, with_usage: bool
) -> None:
    whole = station.post(path, body_for(path)).json()
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    events = station.stream(path, body_for(path, stream=True, **options))
    if with_usage:
        last = events.pop()
        assert last["choices"] == []
        assert last["usage"] == whole["usage"]
        assert all(event["usage"] is None for event in events)
    else:
        assert all("usage" not in event for event in events)
    assert len({event["id"] for event in events}) == 1
    text = whole["choices"][0]["message"]["content"] if path == CHAT else None
    assert "".join(pieces(events)) == (text or whole["choices"][0].get("text"))
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons[:-1] == [None] * (len(events) - 1)
    assert reasons[-1] == whole["choices"][0]["finish_reason"]


def test_a_chat_stream_begins_with_the_role(station: Any) -> None:
    first, *rest = station.stream(CHAT, body_for(CHAT, stream=True))
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in event["choices"][0]["delta"] for event in rest)
    assert {event["object"] for event in rest} == {"chat.completion.chunk"}


def test_events_do_not_tell_what_was_accepted(
    stations: Callable[..., Any], publish: Callable[..., bytes]
) -> None:
    station = stations()
    body = body_for(CHAT, stream=True, max_tokens=40, ignore_eos=True)
    plain = [event["choices"] for event in station.stream(CHAT, body)]
    digest = publish(station, vocab=512)
    station.node.registry.set_channel("everyone", "stable", digest, at_s=0.0)
    station.node.follower.poll()
    drafted = [event["choices"] for event in station.stream(CHAT, body)]
    assert station.node.engine.stats().accepted > 0
    assert drafted == plain
    # The role, one event a token, the end.
    assert len(plain) == 1 + 40 + 1


def test_a_seed_fixes_the_answer_and_its_absence_does_not(station: Any) -> None:
    def answer(**fields: Any) -> str:
        got = station.chat(max_tokens=24, ignore_eos=True, temperature=2, **fields)
        return str(got["choices"][0]["message"]["content"])

    assert answer(seed=-3) == answer(seed=2**64 - 3)
    assert len({answer() for _ in range(4)}) > 1


def test_the_older_names_of_fields_work(station: Any) -> None:
    answer = station.chat(max_tokens=50, max_completion_tokens=3, min_tokens=3, user="someone")
    assert answer["usage"]["completion_tokens"] == 3


def test_fields_without_influence_are_accepted(station: Any) -> None:
    neutral = {
        "service_tier": "auto",
        "prompt_cache_key": "x",
        "metadata": {"domain": "sql", "else": "y"},
        "n": 1,
        "stop": None,
        "logprobs": False,
        "tools": [],
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "prediction": {"type": "content", "content": "z"},
        "something_nobody_has_heard_of": 1,
    }
    one = station.chat(seed=1, max_tokens=6)["choices"]
    assert station.chat(seed=1, max_tokens=6, **neutral)["choices"] == one


def test_logit_bias_and_min_p_reach_the_engine(station: Any) -> None:
    forced = station.node.target.tokenizer("a")["input_ids"][0]
    answer = station.chat(max_tokens=6, logit_bias={str(forced): 100}, temperature=0)
    assert answer["choices"][0]["message"]["content"] == "aaaaaa"


def test_models_and_health(station: Any) -> None:
    headers = {"Authorization": "Bearer key-of-acme"}
    listed = station.http.get("/v1/models", headers=headers).json()
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert model["id"] == "tiny"
    assert station.http.get("/v1/models/tiny", headers=headers).json() == model
    assert station.http.get("/healthz").status_code == 200
    assert station.http.get("/readyz").status_code == 200
