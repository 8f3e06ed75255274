"""The administrator's routes: closed without the key, and what they answer with it."""

import logging
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest

from draftkeep.errors import KeyDestroyedError, StoreError
from draftkeep.serve.engine.counters import Totals

ROUTES = [
    ("GET", "/admin/stats", None),
    ("POST", "/admin/speculation", {"mode": "off"}),
    ("POST", "/admin/erase", {"tenant": "acme", "subject": "someone"}),
]


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
@pytest.mark.parametrize("value", [None, "Bearer", "Bearer key-of-acme", "Basic x"])
def test_without_the_key_every_route_is_403(
    station: Any, method: str, path: str, body: Any, value: str | None
) -> None:
    headers = {} if value is None else {"Authorization": value}
    response = station.http.request(method, path, json=body, headers=headers)
    assert response.status_code == 403
    assert response.json()["error"]["type"] == "permission_error"


@pytest.mark.parametrize("value", ["Bearer ", "Bearer key-of-the-administrator"])
def test_without_a_configured_key_every_route_is_403(
    stations: Callable[..., Any], value: str
) -> None:
    station = stations(serve={"admin_key_sha256": ""})
    for method, path, body in ROUTES:
        headers = [(b"authorization", value.strip().encode())]
        response = station.http.request(method, path, json=body, headers=headers)
        assert response.status_code == 403


def test_an_administrator_is_no_tenant(station: Any) -> None:
    headers = {"Authorization": "Bearer key-of-the-administrator"}
    assert station.http.get("/v1/models", headers=headers).status_code == 401


def test_stats_count_by_domain_and_only_by_configured_ones(stations: Callable[..., Any]) -> None:
    station = stations()
    for domain in ("sql", "sql", "code", "something-private"):
        station.chat(metadata={"domain": domain}, max_tokens=4, min_tokens=4)
    station.capture_stats()
    stats = station.admin("GET", "/admin/stats").json()
    assert {name: row["requests"] for name, row in stats["groups"].items()} == {
        "sql": 2,
        "code": 1,
        "unknown": 1,
    }
    assert stats["groups"]["sql"] == {
        "requests": 2,
        "output_tokens": 8,
        "steps": 8,
        "tested": 0,
        "accepted": 0,
    }
    assert stats["target"] == station.node.target.target_fingerprint.hex()
    assert stats["drafter"] is None
    assert stats["speculation"]["reason"] == "no drafter"
    assert set(stats["speculation"]) >= {"mode", "lookahead", "reason", "est_speedup"}
    assert stats["capture"] == {
        "acknowledged": 4,
        "declined": {},
        "drops": {},
        "pending": 0,
        "cut": 0,
    }
    assert set(stats["engine"]) >= {field.name for field in fields(Totals)}
    assert (stats["engine"]["finished"], stats["engine"]["output_tokens"]) == (4, 16)
    assert (stats["engine"]["row_steps"], stats["engine"]["slots"]) == (16, 4)


def test_speculation_changes_speed_and_no_output(
    stations: Callable[..., Any], publish: Callable[..., bytes]
) -> None:
    station = stations()
    station.node.registry.set_channel("everyone", "stable", publish(station, vocab=512), at_s=0.0)
    station.node.follower.poll()
    answers, steps = [], []
    for mode, lookahead in (("off", None), ("fixed", 1), ("fixed", 5), ("auto", 4)):
        body = {"mode": mode, "lookahead": lookahead}
        reply = station.admin("POST", "/admin/speculation", body).json()
        assert reply == {"mode": mode, "lookahead": lookahead or 3}
        before = station.node.engine.stats().steps
        answers.append(station.chat(seed=9, max_tokens=40, ignore_eos=True)["choices"])
        steps.append(station.node.engine.stats().steps - before)
    assert all(answer == answers[0] for answer in answers)
    assert steps[0] == 40 > steps[1]


@pytest.mark.parametrize(
    "body",
    [
        {"mode": "fast"},
        {"mode": "fixed", "lookahead": 0},
        {"mode": "fixed", "lookahead": 17},
        {"mode": "off", "zebra-canary-77": 1},
        {},
    ],
)
def test_a_bad_speculation_is_refused(station: Any, body: dict[str, Any]) -> None:
    response = station.admin("POST", "/admin/speculation", body)
    assert response.status_code == 400
    assert "zebra" not in response.text


def test_erasing_closes_what_was_captured_and_names_nobody(
    stations: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    station = stations()
    subject = "someone-unmistakable"
    with caplog.at_level(logging.DEBUG):
        station.chat(max_tokens=3, safety_identifier=subject)
        station.chat(max_tokens=3, user="another")
        assert len(station.captured()) == 2
        body = {"tenant": "acme", "subject": subject}
        result = station.admin("POST", "/admin/erase", body).json()
    assert (result["known"], result["aliases"], result["keys_destroyed"]) == (True, 1, 1)
    assert len(bytes.fromhex(result["erasure_id"])) == 16
    with pytest.raises(KeyDestroyedError):
        station.captured()
    assert subject not in caplog.text
    again = station.admin("POST", "/admin/erase", body).json()
    assert again == result


def test_erasing_a_stranger_answers_with_zeros(station: Any) -> None:
    body = {"tenant": "acme", "subject": "nobody"}
    result = station.admin("POST", "/admin/erase", body).json()
    assert (result.pop("known"), result.pop("erasure_id")) == (False, None)
    assert set(result.values()) == {0}


@pytest.mark.parametrize("began", [False, True])
def test_erasing_without_the_catalog_is_to_be_asked_again(
    stations: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, began: bool
) -> None:
    station = stations()
    station.chat(max_tokens=3, safety_identifier="ann")
    assert len(station.captured()) == 1
    body = {"tenant": "acme", "subject": "ann"}
    with monkeypatch.context() as broken:
        broken.setattr(station.node.catalog, "begin" if began else "read", away)
        refused = station.admin("POST", "/admin/erase", body)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    message = refused.json()["error"]["message"]
    assert message.startswith("the catalog is away. ")
    assert message.endswith("ask again to finish it" if began else "Nothing was erased: ask again")
    assert len(station.captured()) == 1
    assert station.admin("POST", "/admin/erase", body).json()["keys_destroyed"] == 1


def away(**_: object) -> None:
    raise StoreError("the catalog is away")


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("tenant", {"tenant": "zebra-canary-77", "subject": "x"}),
        ("subject", {"tenant": "acme", "subject": ""}),
        ("subject", {"tenant": "acme"}),
        (None, {"tenant": "acme", "subject": "x", "zebra-canary-77": 1}),
    ],
    ids=["tenant", "empty", "missing", "extra"],
)
def test_a_bad_erasure_is_refused(station: Any, param: str | None, body: Any) -> None:
    response = station.admin("POST", "/admin/erase", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert "zebra" not in response.text
