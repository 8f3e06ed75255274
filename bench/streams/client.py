"""Streams as somebody on the path sees them: when each event came and how long it was."""

import contextlib
import hashlib
import json
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from draftkeep.errors import DraftkeepError
from draftkeep.files import write_file

_TIMEOUT_S = 300.0
_STOP_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One `data:` line: seconds since the request was sent, bytes on the wire, text it added."""

    at_s: float
    size: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One answer to the prompt numbered `prompt`."""

    prompt: int
    events: tuple[Event, ...]

    @property
    def bytes(self) -> int:
        """Of all its events."""
        return sum(event.size for event in self.events)


class StreamServer:
    """A node of the bench's own process, entered with `with`; `key` opens it."""

    def __init__(
        self, directory: Path, *, drafter_dir: Path, target: str, release: str, tick_s: float
    ) -> None:
        self._directory = directory
        self._drafter_dir = drafter_dir
        self._settings = (target, release, tick_s)
        self._process: subprocess.Popen[str] | None = None
        self.key = secrets.token_urlsafe(16)
        self.url = ""

    def __enter__(self) -> "StreamServer":
        self._directory.mkdir(parents=True, exist_ok=True)
        path = self._directory / "config.toml"
        write_file(path, self._config().encode())
        process = self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.streams.server", str(path), str(self._drafter_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        self.url = process.stdout.readline().strip()
        if not self.url:
            self.__exit__()
            raise DraftkeepError("the node of the stream bench did not start; see its words above")
        return self

    def __exit__(self, *error: object) -> None:
        process = self._process
        if process is None:
            return
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def _config(self) -> str:
        target, release, tick_s = self._settings
        return f"""\
state_dir = {json.dumps(str(self._directory.resolve()))}

[model]
target = {json.dumps(target)}

[serve]
slots = 2
max_context = 256
release = "{release}"
release_tick_s = {tick_s}

[[tenants]]
name = "bench"
api_key_sha256 = "{hashlib.sha256(self.key.encode()).hexdigest()}"
capture = "never"
"""


def record(
    client: httpx.Client, body: dict[str, Any], *, key: str, prompt: int, padded: bool
) -> Stream:
    """Send one request and note its events; DraftkeepError where it is refused."""
    asked = body | {"stream": True, "stream_options": {"include_obfuscation": padded}}
    started_s = time.perf_counter()
    with client.stream(
        "POST",
        "/v1/chat/completions",
        json=asked,
        headers={"Authorization": f"Bearer {key}"},
        timeout=_TIMEOUT_S,
    ) as response:
        if response.status_code != 200:
            raise DraftkeepError(f"the node answered {response.status_code}, expected 200")
        events = [
            Event(at_s=time.perf_counter() - started_s, size=len(line) + 2, text=_text(line))
            for line in _lines(response)
        ]
    return Stream(prompt=prompt, events=tuple(events))


def _lines(response: httpx.Response) -> Iterator[str]:
    return (line for line in response.iter_lines() if line.startswith("data: {"))


def _text(line: str) -> str:
    choices = json.loads(line.removeprefix("data: "))["choices"]
    return str(choices[0]["delta"].get("content") or "") if choices else ""
