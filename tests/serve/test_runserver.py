"""The serving process: its address, its disk filling up under it, its end on a signal."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftkeep.config import Config
from draftkeep.errors import ConfigError
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.serve.runserver import serve

CONFIG = """\
state_dir = "{state}"
[model]
target = "tiny"
threads = 1
[serve]
port = 0
speculation = "off"
max_context = 1024
grace_s = {grace_s}
admin_key_sha256 = "{admin}"
[[tenants]]
name = "acme"
api_key_sha256 = "{key}"
capture = "opt_out"
"""


class Server:
    """`draftkeep serve` in a process of its own."""

    def __init__(self, directory: Path, *, grace_s: float = 20.0) -> None:
        self.state = directory / "state"
        config = directory / "config.toml"
        hashes = {name: sha256(name.encode()).hexdigest() for name in ("admin", "key")}
        config.write_text(CONFIG.format(state=self.state, grace_s=grace_s, **hashes))
        self._logged: str | None = None
        self.process = subprocess.Popen(
            [sys.executable, "-m", "draftkeep", "serve", "--config", str(config)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "HF_HUB_OFFLINE": "1"},
        )
        address = self.state / "serve.json"
        while not address.exists():
            assert self.process.poll() is None, self.stderr()
            time.sleep(0.02)
        self.http = httpx.Client(
            base_url=json.loads(address.read_text())["url"], trust_env=False, timeout=60
        )

    def ask(self, seed: int, max_tokens: int = 12) -> str:
        body = {"model": "tiny", "prompt": "How many", "max_tokens": max_tokens, "seed": seed}
        headers = {"Authorization": "Bearer key"}
        response = self.http.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        return str(response.json()["choices"][0]["text"])

    def stream(self, max_tokens: int) -> contextlib.AbstractContextManager[httpx.Response]:
        """A stream that goes on for so many tokens."""
        body = {
            "model": "tiny",
            "prompt": "How many",
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "stream": True,
        }
        headers = {"Authorization": "Bearer key"}
        return self.http.stream("POST", "/v1/completions", json=body, headers=headers)

    def http_ready(self) -> bool:
        """What `/readyz` says, over a connection of its own."""
        return httpx.get(f"{self.http.base_url}/readyz", trust_env=False).status_code == 200

    def capture(self) -> dict[str, Any]:
        """The capture counters once nothing is pending."""
        headers = {"Authorization": "Bearer admin"}
        while True:
            stats: dict[str, Any] = self.http.get("/admin/stats", headers=headers).json()["capture"]
            if stats["pending"] == 0:
                return stats

    def limit_files(self, size_bytes: int) -> None:
        """From here on no file of the process grows past this size."""
        _, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (size_bytes, hard))

    def stderr(self) -> str:
        """What it logged; ends the process where it still runs."""
        if self._logged is None:
            self.process.kill()
            self._logged = self.process.communicate()[1].decode()
        return self._logged


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(**settings: float) -> Server:
        started.append(Server(tmp_path, **settings))
        return started[-1]

    yield start
    for server in started:
        server.http.close()
        server.stderr()


@pytest.fixture
def server(servers: Callable[..., Server]) -> Server:
    return servers()


def test_a_signal_refuses_the_next_and_lets_the_rest_finish(server: Server) -> None:
    with server.stream(max_tokens=1000) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        server.process.send_signal(signal.SIGTERM)
        with httpx.Client(base_url=server.http.base_url, trust_env=False, timeout=60) as other:
            while (status := other.get("/readyz").status_code) == 200:
                time.sleep(0.01)
            assert status == 503
            refused = other.post(
                "/v1/completions",
                json={"model": "tiny", "prompt": "x"},
                headers={"Authorization": "Bearer key"},
            )
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert other.get("/healthz").status_code == 200
        events = [line for line in lines if line]
    assert events[-1] == "data: [DONE]"
    assert len(events) >= 1000
    assert server.process.wait(60) == 0
    log = SqliteLog.open_reader(server.state / "log" / "traces")
    assert log.bounds() == (0, 1)
    log.close()
    lines_said = [json.loads(line) for line in server.stderr().splitlines()]
    (finished,) = [line for line in lines_said if line.get("output_tokens") == 1000]
    assert (finished["tenant"], finished["status"]) == ("acme", 200)
    assert not [line for line in lines_said if line["level"] in ("ERROR", "CRITICAL")]


@pytest.mark.parametrize("twice", [False, True])
def test_the_grace_ends_by_itself_or_at_a_second_signal(
    servers: Callable[..., Server], twice: bool
) -> None:
    server = servers(grace_s=3600 if twice else 0.2)
    with contextlib.suppress(httpx.RemoteProtocolError), server.stream(max_tokens=1000) as response:
        lines = response.iter_lines()
        next(lines)
        server.process.send_signal(signal.SIGTERM)
        if twice:
            while server.http_ready():
                time.sleep(0.01)
            server.process.send_signal(signal.SIGINT)
        assert "data: [DONE]" not in list(lines)
    assert server.process.wait(60) == 0


def test_a_signal_ends_a_node_whose_model_cannot_be_read_to_the_end(tmp_path: Path) -> None:
    # Who opens it waits for ever for somebody who writes, as on a mount that hangs.
    hanging = tmp_path / "model"
    hanging.mkdir()
    os.mkfifo(hanging / "config.json")
    config = tmp_path / "config.toml"
    config.write_text(
        f'state_dir = "{tmp_path}"\nmodel = {{target = "{hanging}"}}\n[serve]\nport = 0'
    )
    command = [sys.executable, "-m", "draftkeep", "serve", "--config", str(config)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        while "loading the model" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0
    assert "the node is still being loaded" in said


def test_a_full_disk_costs_traces_and_a_signal_costs_nothing(server: Server) -> None:
    before = [server.ask(seed) for seed in range(4)]
    assert server.capture() == {
        "acknowledged": 4,
        "declined": {},
        "drops": {},
        "pending": 0,
        "cut": 0,
    }
    server.limit_files(4096)
    assert [server.ask(seed) for seed in range(4)] == before
    stats = server.capture()
    assert stats["acknowledged"] == 4
    assert sum(stats["drops"].values()) == 4
    assert set(stats["drops"]) <= {"log_failed", "log_full", "breaker_open", "seal_failed"}

    server.limit_files(resource.RLIM_INFINITY)
    while server.capture()["acknowledged"] == 4:
        assert server.ask(0) == before[0]
    kept = server.capture()["acknowledged"]
    for seed in range(6):
        server.ask(seed, max_tokens=30)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    log = SqliteLog.open_reader(server.state / "log" / "traces")
    assert log.bounds() == (0, kept + 6)
    log.close()
    lines = [json.loads(line) for line in server.stderr().splitlines()]
    assert all({"time", "level", "logger", "message"} <= set(line) for line in lines)
    assert not [line for line in lines if line["level"] in ("ERROR", "CRITICAL")]
    assert [line for line in lines if line["message"].startswith("a trace was dropped: ")]


def test_a_taken_port_is_refused_with_the_reason(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        config = Config.model_validate(
            {"state_dir": tmp_path, "serve": {"port": taken.getsockname()[1]}}
        )
        with pytest.raises(ConfigError, match="cannot listen"):
            serve(config)
