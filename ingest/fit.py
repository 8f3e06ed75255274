"""Make a trace fit into one log record: rejected branches go first, then the last positions."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from draftkeep.ingest.trace import Branch, DrafterRun, TopK, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A trace as encoded, and whether something had to be left out of it."""

    trace: Trace
    body: bytes
    cut: bool


def fit_body(trace: Trace, encode: Callable[[Trace], bytes], limit_bytes: int) -> Fitted | None:
    """Encode `trace` into at most `limit_bytes`, leaving out as little as that takes.

    None where not even its first position fits (a prompt too long for any record).
    """
    body = encode(trace)
    if len(body) <= limit_bytes:
        return Fitted(trace=trace, body=body, cut=False)
    if trace.branches:
        trace = replace(trace, branches=())
        body = encode(trace)
    while len(body) > limit_bytes and trace.positions > 1:
        # Aims a little low: a shorter trace compresses slightly worse per position.
        share = 0.95 * limit_bytes / len(body)
        trace = cut_positions(trace, max(1, int(trace.positions * share)))
        body = encode(trace)
    return Fitted(trace=trace, body=body, cut=True) if len(body) <= limit_bytes else None


def cut_positions(trace: Trace, positions: int) -> Trace:
    """The first `positions` output positions of `trace`, marked `output_cut`.

    What belongs to a position goes with it: its distribution, how it came about, its drafter run,
    and every branch that begins at or after the cut.
    """
    if positions >= trace.positions:
        return trace
    processed_T = trace.processed_logprob_T
    return replace(
        trace,
        output_ids_T=trace.output_ids_T[:positions],
        topk=_first_rows(trace.topk, positions),
        how_T=trace.how_T[:positions],
        rejected_T=trace.rejected_T[:positions],
        processed_logprob_T=None if processed_T is None else processed_T[:positions],
        drafters=_first_runs(trace.drafters, positions),
        branches=_before(trace.branches, positions),
        output_cut=True,
    )


def _first_rows(topk: TopK, positions: int) -> TopK:
    return TopK(
        ids_TK=topk.ids_TK[:positions],
        logprobs_TK=topk.logprobs_TK[:positions],
        k_T=topk.k_T[:positions],
        tail_T=topk.tail_T[:positions],
        tail_known_T=topk.tail_known_T[:positions],
    )


def _first_runs(runs: tuple[DrafterRun, ...], positions: int) -> tuple[DrafterRun, ...]:
    kept = []
    for run in runs:
        if positions <= 0:
            break
        kept.append(replace(run, positions=min(run.positions, positions)))
        positions -= run.positions
    return tuple(kept)


def _before(branches: tuple[Branch, ...], positions: int) -> tuple[Branch, ...]:
    return tuple(branch for branch in branches if branch.start < positions)
