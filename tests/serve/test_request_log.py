"""One line a request, telling how it went and nothing of what it said."""

import json
import logging
import re
from collections.abc import Callable, Iterator
from io import StringIO
from typing import Any

import pytest

from draftkeep.serve.logs import JsonFormatter
from tests.serve.station import ADMIN_KEY, API_KEYS, bearer, wait_for

CANARY = "zebra-canary-77"
CHAT = "/v1/chat/completions"


class Lines:
    """Everything that any logger says, as a node writes it to stderr."""

    def __init__(self) -> None:
        self._stream = StringIO()
        self.handler = logging.StreamHandler(self._stream)
        self.handler.setFormatter(JsonFormatter())

    @property
    def text(self) -> str:
        """What was said, without the test's own client."""
        lines = self._stream.getvalue().splitlines()
        return "\n".join(line for line in lines if '"logger": "http' not in line)

    def requests(self) -> list[dict[str, Any]]:
        parsed = [json.loads(line) for line in self.text.splitlines()]
        return [line for line in parsed if line["logger"] == "draftkeep.requests"]

    def wait(self, count: int) -> list[dict[str, Any]]:
        """The requests' lines once there are so many."""
        wait_for(lambda: len(self.requests()) >= count)
        return self.requests()


@pytest.fixture
def lines() -> Iterator[Lines]:
    lines, root = Lines(), logging.getLogger()
    level = root.level
    root.addHandler(lines.handler)
    root.setLevel(logging.DEBUG)
    yield lines
    root.removeHandler(lines.handler)
    root.setLevel(level)


def test_a_line_tells_how_a_request_went(
    stations: Callable[..., Any],
    publish: Callable[..., bytes],
    lines: Lines,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The engine tells what it counted after the answer has left, on a busy machine much later.
    monkeypatch.setattr("draftkeep.serve.request_log.LINGER_S", 2.0)
    station = stations()
    digest = publish(station, vocab=512)
    station.node.registry.set_channel("everyone", "stable", digest, at_s=0.0)
    station.node.follower.poll()
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "How many?"}],
        "max_tokens": 9,
        "n": 2,
        "ignore_eos": True,
        "metadata": {"domain": "sql"},
    }
    response = station.post(CHAT, body)
    (line,) = lines.wait(1)
    answer, uses = response.json(), station.node.engine.stats()
    assert line["request_id"] == response.headers["x-request-id"]
    assert answer["id"].endswith(line["request_id"])
    assert {key: line[key] for key in ("level", "route", "status", "tenant", "domain")} == {
        "level": "INFO",
        "route": CHAT,
        "status": 200,
        "tenant": "acme",
        "domain": "sql",
    }
    assert (line["choices"], line["output_tokens"], line["finish"]) == (2, 18, ["length"])
    assert line["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert line["drafters"] == [digest.hex()[:12]]
    assert (line["drafts_tested"], line["drafts_accepted"]) == (uses.tested, uses.accepted)
    assert line["steps"] == uses.row_steps
    assert 0 <= line["queue_ms"] <= line["first_token_ms"] <= line["total_ms"]


def test_looking_is_no_line_at_info_and_refusals_are(station: Any, lines: Lines) -> None:
    for path in ("/healthz", "/readyz", "/metrics", "/admin/stats"):
        station.http.get(path, headers=bearer(ADMIN_KEY))
    station.http.post(CHAT, json={})
    station.http.post(f"/{CANARY}", json={})
    station.http.post("/admin/erase", json={}, headers=bearer(API_KEYS["acme"]))
    said = [line for line in lines.wait(7) if line["level"] == "INFO"]
    assert [(line["route"], line["status"], line["tenant"]) for line in said] == [
        (CHAT, 401, None),
        ("other", 404, None),
        ("/admin/erase", 403, None),
    ]
    assert all("choices" not in line for line in said)
    assert CANARY not in lines.text


def test_a_request_that_was_given_up_has_its_line(
    stations: Callable[..., Any], gate: Any, lines: Lines
) -> None:
    station = stations()
    body = {"model": "tiny", "prompt": "How many?", "max_tokens": 200, "stream": True}
    body["ignore_eos"] = True
    with station.http.stream(
        "POST", "/v1/completions", json=body, headers=bearer(API_KEYS["acme"])
    ) as response:
        gate.allow(2)
        next(response.iter_lines())
    station.wait_for(lambda: not station.node.requests.in_flight)
    gate.open()
    (line,) = lines.wait(1)
    assert (line["status"], line["client_left"], line["tenant"]) == (200, True, "acme")


def test_lines_are_written_by_themselves_and_nothing_is_kept(
    station: Any, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftkeep.serve.request_log.LINGER_S", 2.0)
    for _ in range(3):
        station.chat(max_tokens=2, ignore_eos=True)
    assert all(line["output_tokens"] == 2 for line in lines.wait(3))
    assert not station.node.requests._entries


def test_a_node_that_closes_writes_what_lingers(
    stations: Callable[..., Any], lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftkeep.serve.request_log.LINGER_S", 3600.0)
    station = stations()
    station.chat(max_tokens=2, ignore_eos=True)
    # The answer leaves before its entry is closed.
    station.wait_for(lambda: not station.node.requests.in_flight)
    assert not lines.requests()
    station.node.close()
    assert [line["output_tokens"] for line in lines.requests()] == [2]


# Where a caller can put something, as (body, headers).
PLACES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "prompt": ({"messages": [{"role": "user", "content": CANARY}]}, {}),
    "role": ({"messages": [{"role": CANARY, "content": "x"}]}, {}),
    "name": ({"messages": [{"role": "user", "content": "x", "name": CANARY}]}, {}),
    "part": ({"messages": [{"role": "user", "content": [{"type": CANARY, CANARY: 1}]}]}, {}),
    "system": ({"messages": [{"role": "system", "content": CANARY}]}, {}),
    "stop": ({"stop": [CANARY]}, {}),
    "too many stops": ({"stop": [CANARY] * 9}, {}),
    "user": ({"user": CANARY}, {}),
    "subject": ({"safety_identifier": CANARY}, {}),
    "subject of the wrong type": ({"safety_identifier": {CANARY: CANARY}}, {}),
    "subject too long": ({"safety_identifier": CANARY * 100}, {}),
    "domain": ({"metadata": {"domain": CANARY}}, {}),
    "metadata": ({"metadata": {CANARY: CANARY}}, {}),
    "metadata of the wrong type": ({"metadata": CANARY}, {}),
    "logit_bias": ({"logit_bias": {CANARY: 1}}, {}),
    "logit_bias value": ({"logit_bias": {"5": CANARY}}, {}),
    "model": ({"model": CANARY}, {}),
    "temperature": ({"temperature": CANARY}, {}),
    "seed": ({"seed": CANARY}, {}),
    "max_tokens": ({"max_tokens": CANARY}, {}),
    "tools": ({"tools": [{"type": "function", "function": {"name": CANARY}}]}, {}),
    "response_format": ({"response_format": {"type": CANARY}}, {}),
    "prompt_cache_key": ({"prompt_cache_key": CANARY}, {}),
    "service_tier": ({"service_tier": CANARY}, {}),
    "an unknown field": ({CANARY: CANARY}, {}),
    "stream_options": ({"stream": True, "stream_options": {CANARY: CANARY}}, {}),
    "api key": ({}, {"Authorization": f"Bearer {CANARY}"}),
    "scheme": ({}, {"Authorization": f"{CANARY} key-of-acme"}),
    "a header": ({}, {"X-Request-Id": CANARY, "OpenAI-Organization": CANARY}),
    "content type": ({}, {"Content-Type": CANARY}),
}


def test_nothing_a_caller_says_is_told_again(station: Any, lines: Lines) -> None:
    for place, (fields, headers) in PLACES.items():
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "How many?"}],
            "max_tokens": 3,
            **fields,
        }
        response = station.http.post(
            CHAT,
            content=json.dumps(body),
            headers={**bearer(API_KEYS["acme"]), "Content-Type": "application/json", **headers},
        )
        assert response.status_code in (200, 400, 401, 404), (place, response.text)
        told = response.text + "".join(f"{k}: {v}\n" for k, v in response.headers.items())
        assert CANARY not in told, place
    broken = station.http.post(
        CHAT, content=f'{{"model": "{CANARY}', headers=bearer(API_KEYS["acme"])
    )
    assert (broken.status_code, CANARY in broken.text) == (400, False)
    lost = station.http.get(f"/v1/models/{CANARY}", headers=bearer(API_KEYS["acme"]))
    assert (lost.status_code, CANARY in lost.text) == (404, False)
    station.capture_stats()
    assert len(lines.wait(len(PLACES))) >= len(PLACES)
    assert CANARY not in lines.text
    shown = [station.admin("GET", path).text for path in ("/admin/stats", "/metrics")]
    assert not [page for page in shown if CANARY in page]
    assert not re.search(r"key-of-(acme|shy|open|the)", lines.text + "".join(shown))
