"""llama.cpp's server as a peer: started for one run, asked over its own completion route.

Its weights are whatever the GGUF files hold, so quantised files make it another model; its cache is
kept in float32, as ours is.
"""

import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from bench.peers.peer import CONTEXT, PeerResult
from bench.prompts import Prompt
from draftkeep.errors import DraftkeepError

_START_S = 180.0
_REQUEST_S = 300.0
_STOP_S = 10.0
_POLL_S = 0.2


class LlamaServer:
    """The server's binary with a target and, for speculation, a drafter, both GGUF files."""

    name = "llama.cpp server"

    def __init__(self, binary: Path, target: Path, draft: Path | None) -> None:
        self._binary = binary
        self._target = target
        self._draft = draft

    @property
    def drafts(self) -> bool:
        """Whether it was given a drafter."""
        return self._draft is not None

    def run(self, prompts: Sequence[Prompt], *, draft_tokens: int, together: bool) -> PeerResult:
        """See `Peer`; the times are those of its HTTP answers."""
        slots = len(prompts) if together else 1
        with self._served(slots, draft_tokens) as client, ThreadPoolExecutor(slots) as pool:
            _complete(client, prompts[0])
            ids: list[list[int]] = []
            seconds: list[float] = []
            for group in [prompts] if together else [[prompt] for prompt in prompts]:
                started_s = time.perf_counter()
                ids += pool.map(lambda prompt: _complete(client, prompt), group)
                seconds.append(time.perf_counter() - started_s)
        return PeerResult(ids=ids, seconds=seconds)

    @contextmanager
    def _served(self, slots: int, draft_tokens: int) -> Iterator[httpx.Client]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        try:
            process = subprocess.Popen(
                [*self._command(slots, draft_tokens), "--host", "127.0.0.1", "--port", str(port)],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise DraftkeepError(
                f"did not start ({type(error).__name__}); check --llama-server"
            ) from None
        try:
            with httpx.Client(
                base_url=f"http://127.0.0.1:{port}", timeout=_REQUEST_S, trust_env=False
            ) as client:
                _await_ready(client, process)
                yield client
        except httpx.HTTPError as error:
            raise DraftkeepError(
                f"did not answer ({type(error).__name__}); run it by hand with the same files"
            ) from None
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _command(self, slots: int, draft_tokens: int) -> list[str]:
        command = [
            *(str(self._binary), "-m", str(self._target), "-t", str(torch.get_num_threads())),
            *("-np", str(slots), "-c", str(slots * CONTEXT), "--cache-ram", "0"),
            *("-ctk", "f32", "-ctv", "f32"),
        ]
        if draft_tokens:
            command += [
                *("-md", str(self._draft), "--spec-type", "draft-simple"),
                *("--spec-draft-n-max", str(draft_tokens), "-ctkd", "f32", "-ctvd", "f32"),
            ]
        return command


def _await_ready(client: httpx.Client, process: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(_POLL_S)
    raise DraftkeepError("did not become ready; run it by hand with the same files")


def _complete(client: httpx.Client, prompt: Prompt) -> list[int]:
    """The answer's token ids, the end of the text included where it came to one."""
    answer = client.post(
        "/completion",
        json={
            "prompt": list(prompt.ids),
            "n_predict": prompt.max_tokens,
            "temperature": 0.0,
            "cache_prompt": False,
            "return_tokens": True,
        },
    )
    if answer.status_code != 200:
        raise DraftkeepError(f"answered {answer.status_code}, expected 200; read what it prints")
    found: dict[str, Any] = answer.json()
    return [int(token) for token in found["tokens"]]
