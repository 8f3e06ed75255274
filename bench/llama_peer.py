"""llama.cpp's server as a peer: started for one run, asked over its own completion route.

Its weights are whatever the GGUF file holds, so quantised files make it another model: the rows
say only that it was llama.cpp.
"""

import json
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import httpx
import torch

from bench.serving_setup import CONTEXT
from bench.serving_work import Prompt
from draftkeep.errors import DraftkeepError

_START_S = 180.0
_REQUEST_S = 300.0
_STOP_S = 10.0


class LlamaServer:
    """The server's binary with a target and, for speculation, a drafter, both GGUF files."""

    def __init__(self, binary: Path, target: Path, draft: Path | None) -> None:
        self._binary = binary
        self._target = target
        self._draft = draft

    @property
    def has_draft(self) -> bool:
        """Whether it can speculate with a draft model."""
        return self._draft is not None

    def tokens_per_s(self, prompts: Sequence[Prompt], *, draft: bool) -> float:
        """Greedy tokens a second over the prompts, one after another, in a server of its own.

        Raises DraftkeepError where it does not start or answer.
        """
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        command = [
            *(str(self._binary), "-m", str(self._target), "--port", str(port)),
            *("--host", "127.0.0.1", "-c", str(CONTEXT), "-t", str(torch.get_num_threads())),
            *(("-md", str(self._draft)) if draft else ()),
        ]
        try:
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        except OSError as error:
            raise DraftkeepError(f"did not start ({type(error).__name__})") from None
        try:
            with httpx.Client(
                base_url=f"http://127.0.0.1:{port}", timeout=_REQUEST_S, trust_env=False
            ) as client:
                _await_ready(client, process)
                return _measure(client, prompts)
        except httpx.HTTPError as error:
            raise DraftkeepError(f"did not answer ({type(error).__name__})") from None
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _await_ready(client: httpx.Client, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + _START_S
    while time.monotonic() < deadline_s and process.poll() is None:
        try:
            if client.get("/health").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise DraftkeepError("did not become ready; run it by hand with the same files")


def _measure(client: httpx.Client, prompts: Sequence[Prompt]) -> float:
    _complete(client, prompts[0])
    started_s = time.perf_counter()
    tokens = sum(_complete(client, prompt) for prompt in prompts)
    return tokens / (time.perf_counter() - started_s)


def _complete(client: httpx.Client, prompt: Prompt) -> int:
    answer = client.post(
        "/completion",
        json={
            "prompt": list(prompt.ids),
            "n_predict": prompt.max_tokens,
            "temperature": 0.0,
            "cache_prompt": False,
        },
    )
    if answer.status_code != 200:
        raise DraftkeepError(f"answered {answer.status_code}, expected 200")
    return int(json.loads(answer.text)["tokens_predicted"])
