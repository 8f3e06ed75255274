"""The probes: alive, ready, draining, dead, and not loaded yet."""

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

import draftkeep
from draftkeep.serve.http.app import build_app
from tests.serve.station import API_KEYS, bearer, wait_for
from tests.services.processes import free_port

COMPLETION = {"model": "tiny", "prompt": "How many?", "max_tokens": 5, "ignore_eos": True}


def probes(http: httpx.Client) -> tuple[int, int, int]:
    """(/healthz, /health, /readyz)."""
    healthz, health, readyz = (http.get(path) for path in ("/healthz", "/health", "/readyz"))
    return healthz.status_code, health.status_code, readyz.status_code


def test_a_node_says_that_it_serves_and_which_version(station: Any) -> None:
    assert probes(station.http) == (200, 200, 200)
    assert station.http.get("/version").json() == {"version": draftkeep.__version__}


def test_a_draining_node_finishes_what_it_has_and_takes_nothing(
    stations: Callable[..., Any], gate: Any
) -> None:
    station = stations()
    answers: list[Any] = []
    running = threading.Thread(
        target=lambda: answers.append(station.post("/v1/completions", COMPLETION))
    )
    running.start()
    assert gate.waiting.wait(60)
    station.node.drain()
    assert probes(station.http) == (200, 200, 503)
    assert int(station.http.get("/readyz").headers["retry-after"]) >= 1
    refused = station.post("/v1/completions", COMPLETION)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    assert refused.json()["error"]["type"] == "service_unavailable_error"
    gate.open()
    running.join()
    assert answers[0].status_code == 200
    assert answers[0].json()["usage"]["completion_tokens"] == 5


def test_a_dead_engine_is_a_dead_node(
    stations: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    station = stations()

    def die() -> bool:
        raise RuntimeError("zebra-canary-77")

    monkeypatch.setattr(station.node.engine, "step", die)
    station.node.engine.wake()
    station.wait_for(lambda: not station.node.alive)
    assert probes(station.http) == (503, 503, 503)
    refused = station.post("/v1/completions", COMPLETION)
    assert refused.status_code == 503
    assert "zebra" not in refused.text


def test_an_engine_that_hangs_is_a_dead_node_until_it_goes_on(
    stations: Callable[..., Any], gate: Any, caplog: pytest.LogCaptureFixture
) -> None:
    station = stations(serve={"stall_s": 2.0})
    answers: list[Any] = []
    running = threading.Thread(
        target=lambda: answers.append(station.post("/v1/completions", COMPLETION))
    )
    with caplog.at_level(logging.WARNING):
        running.start()
        assert gate.waiting.wait(60)
        station.wait_for(lambda: probes(station.http) == (503, 503, 503))
        refused = station.post("/v1/completions", COMPLETION)
        assert refused.status_code == 503
        gate.open()
        running.join()
        station.wait_for(lambda: probes(station.http) == (200, 200, 200))
    assert answers[0].status_code == 200
    said = [message for message in caplog.messages if "the engine" in message]
    assert "has not come round" in said[0]
    assert "has recovered" in said[-1]


def test_a_node_that_is_being_loaded_says_so(tmp_path: Path) -> None:
    """The model's directory does not answer until the test lets it, and then with nonsense."""
    model, config = tmp_path / "model", tmp_path / "draftkeep.toml"
    model.mkdir()
    os.mkfifo(model / "config.json")
    port = free_port()
    config.write_text(
        f'state_dir = "{tmp_path / "state"}"\n[model]\ntarget = "{model}"\n'
        f"[serve]\nport = {port}\nopen_metrics = true\n"
        f'[[tenants]]\nname = "acme"\napi_key_sha256 = "{"0" * 64}"\n'
    )
    process = subprocess.Popen(
        [sys.executable, "-m", "draftkeep", "serve", "--config", str(config)],
        stderr=subprocess.PIPE,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=60) as http:
        wait_for(lambda: _listening(port))
        assert probes(http) == (200, 200, 503)
        refused = http.post("/v1/completions", json=COMPLETION, headers=bearer(API_KEYS["acme"]))
        assert refused.status_code == http.get("/metrics").status_code == 503
        assert int(refused.headers["retry-after"]) >= 1
        assert "being loaded" in refused.json()["error"]["message"]
        assert http.get("/version").status_code == 200
    (model / "config.json").write_text("nonsense")
    said = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 2
    assert "is not a JSON object" in said
    assert "Traceback" not in said


def _listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_a_request_that_came_during_the_loading_is_told_so_to_its_end(station: Any) -> None:
    """Its body arrives when the node is there; nothing was set up for it when it came."""
    app = build_app()
    sent: list[dict[str, Any]] = []
    body = json.dumps(COMPLETION).encode()
    headers = {**bearer(API_KEYS["acme"]), "content-type": "application/json"}

    async def receive() -> dict[str, Any]:
        app.state.node = station.node
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "root_path": "",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
    }
    asyncio.run(app(scope, receive, send))
    assert sent[0]["status"] == 503
    assert b"being loaded" in sent[1]["body"]
