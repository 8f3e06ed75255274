"""Keys and scopes over HTTP: who may call which route, and what a tenant's limits answer."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.serve.station import ADMIN_KEY, API_KEYS, bearer, sha256

KEYS = {
    "everything": ["chat", "completions", "metrics"],
    "chats": ["chat"],
    "completes": ["completions"],
    "reads": ["metrics"],
}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "How many?"}], "max_tokens": 2}
COMPLETION = {"model": "tiny", "prompt": "How many?", "max_tokens": 2}


def ask(station: Any, route: str, key: str) -> Any:
    if route in ("/metrics", "/v1/models", "/v1/models/tiny", "/admin/stats"):
        return station.http.get(route, headers=bearer(key))
    body = CHAT if route == "/v1/chat/completions" else COMPLETION
    return station.http.post(route, json=body, headers=bearer(key))


def tenants(**limits: Any) -> list[dict[str, Any]]:
    keys = [{"sha256": sha256(key), "scopes": scopes} for key, scopes in KEYS.items()]
    names = [
        {"name": name, "api_key_sha256": sha256(key), "capture": "never", "limits": limits}
        for name, key in API_KEYS.items()
    ]
    return [{"name": "keyed", "keys": keys, "domains": ["sql"]}, *names]


def test_a_key_opens_what_its_scopes_say(stations: Callable[..., Any]) -> None:
    station = stations(tenants=tenants())
    scopes = {
        "/v1/chat/completions": "chat",
        "/v1/completions": "completions",
        "/metrics": "metrics",
    }
    for route, scope in scopes.items():
        for key, granted in KEYS.items():
            response = ask(station, route, key)
            if scope in granted:
                assert response.status_code == 200, response.text
                continue
            assert response.status_code == 403
            error = response.json()["error"]
            assert error["type"] == "permission_error"
            assert f"the scope {scope}" in error["message"]
            assert key not in response.text
        assert ask(station, route, "no such key").status_code == 401
        assert (
            station.http.request(
                "GET" if scope == "metrics" else "POST", route, json=CHAT
            ).status_code
            == 401
        )
    for key in KEYS:
        assert ask(station, "/v1/models", key).status_code == 200
        assert ask(station, "/admin/stats", key).status_code == 403


@pytest.mark.parametrize("opened", [False, True])
def test_metrics_are_the_administrators_unless_opened(
    stations: Callable[..., Any], opened: bool
) -> None:
    station = stations(serve={"open_metrics": opened})
    assert ask(station, "/metrics", ADMIN_KEY).status_code == 200
    without = station.http.get("/metrics").status_code
    assert without == ask(station, "/metrics", "no such key").status_code
    assert without == (200 if opened else 401)
    assert ask(station, "/metrics", API_KEYS["acme"]).status_code == (200 if opened else 403)


def test_a_tenant_over_its_rate_is_told_when_to_come_back(stations: Callable[..., Any]) -> None:
    station = stations(tenants=tenants(requests_per_minute=2))
    for _ in range(2):
        assert ask(station, "/v1/completions", API_KEYS["acme"]).status_code == 200
    response = ask(station, "/v1/completions", API_KEYS["acme"])
    assert response.status_code == 429
    assert response.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(response.headers["retry-after"]) <= 30
    assert "requests per minute" in response.json()["error"]["message"]
    assert ask(station, "/v1/completions", API_KEYS["open"]).status_code == 200
    assert ask(station, "/v1/completions", "everything").status_code == 200
    use = station.admin("GET", "/admin/stats").json()["tenants"]
    assert (use["acme"]["requests"], use["acme"]["refused"]) == (2, 1)
    assert use["acme"]["tokens"] > 4
    assert (use["open"]["refused"], use["keyed"]["refused"], use["acme"]["running"]) == (0, 0, 0)


def test_tokens_that_were_not_used_come_back(stations: Callable[..., Any]) -> None:
    station = stations(tenants=tenants(tokens_per_minute=120))
    end = station.node.target.eos_ids[0]
    body = {**COMPLETION, "max_tokens": 80, "logit_bias": {str(end): 100}}
    used = 0
    for _ in range(5):
        answer = station.post("/v1/completions", body)
        assert answer.status_code == 200, answer.text
        used += answer.json()["usage"]["total_tokens"]
    stats = station.admin("GET", "/admin/stats").json()["tenants"]["acme"]
    assert stats == {"requests": 5, "tokens": used, "running": 0, "refused": 0}
    over = station.post("/v1/completions", {**COMPLETION, "max_tokens": 150})
    assert over.status_code == 400
    assert over.json()["error"]["param"] == "max_tokens"


@pytest.mark.parametrize("n", [1, 3])
def test_a_chat_without_a_bound_has_what_a_minute_allows(
    stations: Callable[..., Any], n: int
) -> None:
    station = stations(tenants=tenants(tokens_per_minute=200))
    body = {"model": "tiny", "messages": CHAT["messages"], "ignore_eos": True, "n": n}
    response = station.post("/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    answer = response.json()
    usage = answer["usage"]
    assert usage["completion_tokens"] == (200 - usage["prompt_tokens"]) // n * n
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert usage["total_tokens"] < station.node.max_context
    stats = station.admin("GET", "/admin/stats").json()["tenants"]["acme"]
    assert stats["tokens"] == usage["total_tokens"]


def test_a_prompt_over_a_minutes_tokens_is_refused(stations: Callable[..., Any]) -> None:
    station = stations(tenants=tenants(tokens_per_minute=10))
    response = station.post("/v1/chat/completions", {**CHAT, "max_tokens": None})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "max_tokens"


def test_one_tenants_answers_under_way_leave_the_other_its_own(
    stations: Callable[..., Any], gate: Any
) -> None:
    station = stations(tenants=tenants(concurrent=1))
    answers: list[Any] = []
    first = threading.Thread(
        target=lambda: answers.append(ask(station, "/v1/completions", API_KEYS["acme"]))
    )
    first.start()
    assert gate.waiting.wait(60)
    refused = ask(station, "/v1/completions", API_KEYS["acme"])
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    second = threading.Thread(
        target=lambda: answers.append(ask(station, "/v1/completions", API_KEYS["open"]))
    )
    second.start()
    gate.open()
    first.join()
    second.join()
    assert [answer.status_code for answer in answers] == [200, 200]
    assert ask(station, "/v1/completions", API_KEYS["acme"]).status_code == 200
