"""Serving nodes over the toy target, reached over loopback, and a look into what they captured."""

import hashlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from draftkeep.config import Config
from draftkeep.ingest.codec import decode_body
from draftkeep.ingest.envelope import Opener
from draftkeep.ingest.header import Header
from draftkeep.ingest.record import decode_record
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.ingest.tables import RemapTable
from draftkeep.ingest.trace import Trace
from draftkeep.policies.job_keys import JobKeys
from draftkeep.serve.engine import decode_step, verification
from draftkeep.serve.http.app import build_app
from draftkeep.serve.node import Node
from draftkeep.store.nodes import node_public

API_KEYS = {"acme": "key-of-acme", "shy": "key-of-shy", "open": "key-of-open"}
ADMIN_KEY = "key-of-the-administrator"
WAIT_S = 60.0


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def slow_log(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """From here on every append to a log waits for this event."""
    go, append = threading.Event(), SqliteLog.append

    def slow(log: SqliteLog, records: Any) -> int:
        go.wait()
        return append(log, records)

    monkeypatch.setattr(SqliteLog, "append", slow)
    return go


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until it holds; the bound only keeps a broken test from hanging."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        time.sleep(0.005)


class Station:
    """A started node behind a real HTTP server."""

    def __init__(self, node: Node, config: Config) -> None:
        self.node = node
        self.config = config
        self.server = uvicorn.Server(
            uvicorn.Config(
                build_app(node),
                port=0,
                log_config=None,
                access_log=False,
                lifespan="off",
                ws="none",
            )
        )
        self._thread = threading.Thread(target=self.server.run)
        node.start()
        self._thread.start()
        wait_for(lambda: self.server.started)
        port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=WAIT_S)

    @staticmethod
    def wait_for(condition: Callable[[], object]) -> None:
        wait_for(condition)

    def stop(self) -> None:
        self.http.close()
        self.server.should_exit = True
        self._thread.join()
        self.node.close()

    def post(self, path: str, body: Any, *, tenant: str = "acme") -> httpx.Response:
        return self.http.post(path, json=body, headers=bearer(API_KEYS[tenant]))

    def chat(
        self, text: str = "How many?", *, tenant: str = "acme", **fields: Any
    ) -> dict[str, Any]:
        """A chat request that must succeed."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
        response = self.post("/v1/chat/completions", body, tenant=tenant)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stream(self, path: str, body: dict[str, Any], *, tenant: str = "acme") -> list[Any]:
        """The events of a stream; the last must be [DONE], which is left out."""
        headers = bearer(API_KEYS[tenant])
        with self.http.stream("POST", path, json=body, headers=headers) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = [line for line in response.iter_lines() if line]
        assert all(line.startswith("data: ") for line in lines)
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]

    def admin(self, method: str, path: str, body: Any = None) -> httpx.Response:
        return self.http.request(method, path, json=body, headers=bearer(ADMIN_KEY))

    def capture_stats(self) -> dict[str, Any]:
        """The capture counters once nothing is pending."""
        wait_for(lambda: self.node.capture.pending == 0)
        stats: dict[str, Any] = self.admin("GET", "/admin/stats").json()["capture"]
        return stats

    def captured(self) -> list[tuple[Header, Trace]]:
        """Everything in the log, opened as a distillation job would."""
        wait_for(lambda: self.node.capture.pending == 0)
        keys = JobKeys.open(self.config.keys_path, clock=time.time)
        opener = Opener(keys, lambda name: node_public(self.node.catalog, name), clock=time.time)
        log = SqliteLog.open_reader(self.config.log_path)
        try:
            sealed = [decode_record(record.data) for record in log.read(0, 1000, 2**30)]
            table = RemapTable.identity()
            return [
                (one.parsed, decode_body(opener.open(one), lambda digest: table)) for one in sealed
            ]
        finally:
            log.close()
            keys.close()


class StepGate:
    """Stands before every pass of the target and lets through as many as it was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._permits = threading.Semaphore(0)
        self._open = False
        self.error: Exception | None = None
        self.waiting = threading.Event()
        monkeypatch.setattr(decode_step, "target_pass", self._pass(verification.target_pass))

    def allow(self, passes: int) -> None:
        self._permits.release(passes)

    def open(self) -> None:
        self._open = True
        self.allow(1)

    def _pass(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def gated(*arguments: Any) -> Any:
            if not self._open:
                self.waiting.set()
                self._permits.acquire()
                self.waiting.clear()
            if self.error is not None:
                raise self.error
            return real(*arguments)

        return gated


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def configuration(state_dir: Path, **sections: dict[str, Any]) -> Config:
    """Three tenants: `acme` opts out, `shy` opts in, `open` never captures."""
    capture = {"acme": "opt_out", "shy": "opt_in", "open": "never"}
    serve = {
        "slots": 4,
        "max_context": 256,
        "speculation": "fixed",
        "lookahead": 3,
        "floor": "none",
        "follow_s": 0.05,
        "admin_key_sha256": sha256(ADMIN_KEY),
    }
    tenants = [
        {
            "name": name,
            "api_key_sha256": sha256(key),
            "domains": ["sql", "code"],
            "capture": capture[name],
            "consent": "pool",
        }
        for name, key in API_KEYS.items()
    ]
    data: dict[str, Any] = {"state_dir": state_dir, "tenants": tenants, **sections}
    data["serve"] = serve | sections.get("serve", {})
    return Config.model_validate(data)
