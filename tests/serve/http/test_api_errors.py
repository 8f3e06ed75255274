"""What is refused, in OpenAI's form, naming the field and never repeating what was sent."""

import json
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from draftkeep.serve.http import api, http_errors

CHAT, COMPLETIONS, MODELS = "/v1/chat/completions", "/v1/completions", "/v1/models"
CANARY = "zebra-canary-77"
MESSAGES = [{"role": "user", "content": CANARY}]
HEADERS = {"Authorization": "Bearer key-of-acme"}

BAD_CHAT: list[tuple[str, dict[str, Any]]] = [
    ("messages", {"messages": []}),
    ("messages", {"messages": CANARY}),
    ("messages", {"messages": [{"role": CANARY, "content": "x"}]}),
    ("messages", {"messages": [{"role": "user", "content": None}]}),
    ("messages", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
    ("messages", {"messages": [{"role": "user", "content": f"\ud800{CANARY}"}]}),
    ("messages", {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]}),
    ("messages", {"messages": [{"role": "user", "content": CANARY * 1000}]}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_completion_tokens", {"max_completion_tokens": -1}),
    ("temperature", {"temperature": 2.1}),
    ("temperature", {"temperature": -0.1}),
    ("temperature", {"temperature": float("nan")}),
    ("temperature", {"temperature": CANARY}),
    ("top_p", {"top_p": 0}),
    ("top_p", {"top_p": 1.01}),
    ("top_k", {"top_k": -2}),
    ("min_p", {"min_p": 1.5}),
    ("presence_penalty", {"presence_penalty": 2.5}),
    ("frequency_penalty", {"frequency_penalty": float("inf")}),
    ("repetition_penalty", {"repetition_penalty": 0}),
    ("logit_bias", {"logit_bias": {"5": 101}}),
    ("logit_bias", {"logit_bias": {CANARY: 1}}),
    ("logit_bias", {"logit_bias": {"5": float("nan")}}),
    ("logit_bias", {"logit_bias": {"99999999": 1}}),
    ("seed", {"seed": 2**64}),
    ("seed", {"seed": 1.5}),
    ("min_tokens", {"min_tokens": -1}),
    ("metadata", {"metadata": {CANARY: 5}}),
    ("user", {"user": "u" * 129}),
    ("safety_identifier", {"safety_identifier": ["x"]}),
    ("stream_options", {"stream_options": {"include_usage": True}}),
    ("store", {"store": CANARY}),
    ("n", {"n": 0}),
    ("n", {"n": 9}),
    ("stop", {"stop": [CANARY] * 5}),
    ("stop", {"stop": ["x", ""]}),
    ("stop", {"stop": CANARY * 30}),
    ("stop", {"stop": 5}),
    ("stop_token_ids", {"stop_token_ids": [512]}),
    ("stop_token_ids", {"stop_token_ids": [3] * 65}),
    ("logprobs", {"logprobs": 1}),
    ("top_logprobs", {"top_logprobs": 3}),
    ("top_logprobs", {"logprobs": False, "top_logprobs": 3}),
    ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
    ("echo", {"echo": True}),
    ("best_of", {"best_of": 2}),
    ("prompt_logprobs", {"prompt_logprobs": 0}),
    ("include_stop_str_in_output", {"include_stop_str_in_output": True}),
    ("response_format", {"response_format": {"type": "json_object"}}),
    ("response_format", {"response_format": {"type": "json_schema", "json_schema": {}}}),
    ("tools", {"tools": [{"type": "function", "function": {"name": CANARY}}]}),
    ("tool_choice", {"tool_choice": "required"}),
    ("structured_outputs", {"structured_outputs": {"regex": CANARY}}),
    ("chat_template", {"chat_template": CANARY}),
]
BAD_COMPLETION: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": [CANARY, ""]}),
    ("prompt", {"prompt": [[5], []]}),
    ("prompt", {"prompt": [[5], [512]]}),
    ("prompt", {"prompt": [[5], [5] * 256]}),
    ("prompt", {"prompt": [5, CANARY]}),
    ("prompt", {"prompt": [CANARY] * 33}),
    ("prompt", {"prompt": [CANARY] * 5, "n": 8}),
    ("prompt", {"prompt": {CANARY: 1}}),
    ("prompt", {"prompt": [512]}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": [5] * 256}),
    ("prompt", {"prompt": None}),
    ("echo", {"echo": True, "logprobs": 0}),
    ("best_of", {"best_of": 2}),
    ("best_of", {"best_of": 3, "n": 2}),
    ("suffix", {"suffix": CANARY}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": -1}),
    ("logprobs", {"logprobs": True}),
    ("top_logprobs", {"logprobs": 1, "top_logprobs": 1}),
]


def numbered(cases: list[tuple[str, dict[str, Any]]]) -> list[str]:
    return [f"{param}-{number}" for number, (param, _) in enumerate(cases)]


def refused(response: Any, status: int, param: str | None) -> dict[str, Any]:
    """The error of a response that must be one."""
    assert response.status_code == status, response.text
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert CANARY not in response.text
    return error


@pytest.mark.parametrize(("param", "fields"), BAD_CHAT, ids=numbered(BAD_CHAT))
def test_a_bad_chat_request_is_refused(station: Any, param: str, fields: dict[str, Any]) -> None:
    body = json.dumps({"model": "tiny", "messages": MESSAGES, **fields})
    headers = {**HEADERS, "Content-Type": "application/json"}
    response = station.http.post(CHAT, content=body, headers=headers)
    assert refused(response, 400, param)["type"] == "invalid_request_error"


@pytest.mark.parametrize(("param", "fields"), BAD_COMPLETION, ids=numbered(BAD_COMPLETION))
def test_a_bad_completion_is_refused(station: Any, param: str, fields: dict[str, Any]) -> None:
    refused(station.post(COMPLETIONS, {"model": "tiny", "prompt": "x", **fields}), 400, param)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b'{"model": "tiny", "zebra-canary-77', "application/json"),
        (b"", "application/json"),
        (b'["zebra-canary-77"]', "application/json"),
        (b"\xff\xfe\x00", "application/json"),
        (b"[" * 100_000, "application/json"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "application/json"),
        (b'{"model": "tiny"}', "text/plain"),
        (b"model=zebra-canary-77", "application/x-www-form-urlencoded"),
    ],
    ids=["cut", "empty", "list", "binary", "deep", "digits", "text", "form"],
)
def test_a_malformed_body_is_refused(station: Any, content: bytes, kind: str) -> None:
    headers = {**HEADERS, "Content-Type": kind}
    refused(station.http.post(CHAT, content=content, headers=headers), 400, None)


def test_a_missing_field_is_named(station: Any) -> None:
    refused(station.post(CHAT, {"model": "tiny"}), 400, "messages")
    refused(station.post(CHAT, {"messages": MESSAGES}), 400, "model")


@pytest.mark.parametrize(
    "value", [None, "", "Bearer", "Basic a2V5", "Bearer zebra-canary-77", "key-of-acme"]
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MODELS])
def test_an_unknown_tenant_gets_nothing(station: Any, value: str | None, path: str) -> None:
    headers = {} if value is None else {"Authorization": value}
    method = "GET" if path == MODELS else "POST"
    before = station.node.engine.stats().prompt_tokens
    response = station.http.request(method, path, json={"model": "tiny"}, headers=headers)
    error = refused(response, 401, None)
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert station.node.engine.stats().prompt_tokens == before


def test_an_unknown_model_or_route_is_404(station: Any) -> None:
    body = {"model": CANARY, "messages": MESSAGES}
    error = refused(station.post(CHAT, body), 404, "model")
    assert (error["type"], error["code"]) == ("not_found_error", "model_not_found")
    refused(station.http.get(f"{MODELS}/{CANARY}", headers=HEADERS), 404, "model")
    for response, status in (
        (station.http.get(f"/{CANARY}", headers=HEADERS), 404),
        (station.http.get(CHAT, headers=HEADERS), 405),
    ):
        assert refused(response, status, None)["type"] == "invalid_request_error"


def test_a_body_of_many_megabytes_is_refused(station: Any) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": CANARY * 300_000}]}
    refused(station.post(CHAT, body), 413, None)
    chunks = (b" " * 65_536 for _ in range(100))  # no Content-Length
    headers = {**HEADERS, "Content-Type": "application/json"}
    refused(station.http.post(CHAT, content=chunks, headers=headers), 413, None)
    station.chat(max_tokens=1)


def test_the_longest_prompt_that_fits_is_served(station: Any) -> None:
    body = {"model": "tiny", "prompt": [5] * 255, "max_tokens": 50, "ignore_eos": True}
    answer = station.post(COMPLETIONS, body).json()
    assert answer["usage"]["completion_tokens"] == 1
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a_full_queue_is_429_with_retry_after(stations: Callable[..., Any], gate: Any) -> None:
    station = stations(serve={"slots": 1, "queue": 1})
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}
    threads = [threading.Thread(target=station.post, args=(CHAT, body)) for _ in range(2)]
    threads[0].start()
    assert gate.waiting.wait(60)
    threads[1].start()
    station.wait_for(lambda: station.node.engine.stats().waiting == 1)
    response = station.post(CHAT, body)
    assert refused(response, 429, None)["type"] == "rate_limit_error"
    assert int(response.headers["retry-after"]) >= 1
    gate.open()
    for thread in threads:
        thread.join()
    assert station.capture_stats()["drops"]["request_failed"] == 1


def test_a_failing_pass_is_an_error_whole_and_streamed(
    stations: Callable[..., Any], gate: Any
) -> None:
    station = stations()
    gate.error = RuntimeError(CANARY)
    gate.open()
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 9}
    refused(station.post(CHAT, body), 500, None)
    role, error = station.stream(CHAT, {**body, "stream": True})
    assert role["choices"][0]["delta"]["role"] == "assistant"
    assert error["error"]["type"] == "server_error"
    assert CANARY not in json.dumps(error)
    gate.error = None
    station.chat(max_tokens=2)
    assert station.capture_stats()["drops"] == {"request_failed": 2}
    assert station.node.engine.stats().running == 0


def test_a_stream_that_fails_in_the_middle_ends_with_an_error(
    stations: Callable[..., Any], gate: Any
) -> None:
    station = stations()
    body = {"model": "tiny", "messages": MESSAGES, "stream": True, "ignore_eos": True}
    events: list[Any] = []
    reader = threading.Thread(target=lambda: events.extend(station.stream(CHAT, body)))
    reader.start()
    gate.allow(3)
    assert gate.waiting.wait(60)
    station.wait_for(lambda: station.node.engine.stats().output_tokens == 3)
    gate.error = RuntimeError("broken")
    gate.open()
    reader.join()
    assert "error" in events[-1]
    assert [event["choices"][0]["finish_reason"] for event in events[:-1]] == [None] * 4


def test_what_nobody_expected_is_logged_without_the_path(
    station: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError(CANARY)

    monkeypatch.setattr(api, "_check_model", broken)
    # Over a connection of its own: the server closes one on which it met the unexpected.
    url = f"{station.url}{MODELS}/{CANARY}"
    refused(httpx.get(url, headers=HEADERS, trust_env=False), 500, None)
    written = [r.getMessage() for r in caplog.records if r.name == http_errors.__name__]
    assert written == ["unexpected RuntimeError on /v1/models/{model_id:path}"]


def test_a_dead_engine_is_503_for_those_who_wait_and_those_who_come(
    stations: Callable[..., Any], gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    station = stations()
    body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 100, "ignore_eos": True}
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(station.post(CHAT, body)))
    waiting.start()
    assert gate.waiting.wait(60)
    monkeypatch.setattr(station.node.engine, "step", lambda: 1 / 0)
    gate.open()
    waiting.join()
    refused(answers[0], 503, None)
    refused(station.post(CHAT, body), 503, None)
    assert station.http.get("/readyz").status_code == 503
    station.wait_for(lambda: not station.node.alive)
    assert station.http.get("/healthz").status_code == 503
