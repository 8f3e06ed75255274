"""Evaluation: a drafter's measures on held-out traces, by request and by domain.

N: positions with a stored list; K: its entries; V: the target's vocabulary; D: the drafter's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from draftkeep.distill.batch import hidden_NC, make_inputs, trainable_T
from draftkeep.distill.replay import Replayed, replay, replayable
from draftkeep.distill.selection import Opened
from draftkeep.ingest.trace import Finish, Origin, Trace
from draftkeep.kernels.measures import Walk, acceptance_rate, expected_acceptance, walk
from draftkeep.policies.gate import PairedScore
from draftkeep.store.models.drafter import Drafter

_UNKNOWN_BUDGET = 2**31
_BATCH_TRACES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceScore:
    """One drafter on one held-out trace: `accepted` of `proposed` drafts, and the walk.

    Both `accepted` and the walk are expectations where the trace's noise is not known.
    """

    trace_id: bytes
    request: bytes
    domain: str | None
    accepted: float
    proposed: int
    walk: Walk


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One drafter on held-out traces, walked at one lookahead."""

    scores: tuple[TraceScore, ...]
    lookahead: int

    @property
    def replay_acceptance(self) -> float:
        """The share of all proposals that is accepted; NaN without any."""
        return acceptance_rate(
            sum(score.accepted for score in self.scores),
            sum(score.proposed for score in self.scores),
        )

    @property
    def walk(self) -> Walk:
        """What the engine would have counted over all traces at this lookahead."""
        return sum((score.walk for score in self.scores), start=Walk())

    def by_domain(self) -> dict[str | None, "Evaluation"]:
        """The same for each domain met, in order of name."""
        names = {score.domain for score in self.scores}
        return {
            name: replace(
                self, scores=tuple(score for score in self.scores if score.domain == name)
            )
            for name in sorted(names, key=lambda name: name or "")
        }


def evaluate(
    drafter: Drafter, held_out: Sequence[Opened], *, context: int, lookahead: int
) -> Evaluation:
    """Replay a drafter on the held-out traces that can be replayed; the rest is left out.

    Those are served (not relabelled or tapped), with their whole prompt, under either verification
    rule. `context` is the engine's limit in tokens.
    """
    usable = [item for item in held_out if _usable(item)]
    results = replay(drafter, [item.trace for item in usable], context=context)
    return Evaluation(
        scores=tuple(
            _score(item, result, lookahead) for item, result in zip(usable, results, strict=True)
        ),
        lookahead=lookahead,
    )


def paired(candidate: Evaluation, incumbent: Evaluation) -> list[PairedScore]:
    """Both drafters on each trace that both were evaluated on and proposed something for."""
    before = {score.trace_id: score for score in incumbent.scores}
    return [
        PairedScore(
            request=score.request,
            domain=score.domain,
            candidate=acceptance_rate(score.accepted, score.proposed),
            incumbent=acceptance_rate(known.accepted, known.proposed),
        )
        for score in candidate.scores
        if (known := before.get(score.trace_id)) and known.proposed and score.proposed
    ]


@torch.inference_mode()
def raw_expected_acceptance(drafter: Drafter, traces: Sequence[Trace]) -> float:
    """Expected acceptance over the traces' stored distributions, NaN without any.

    p and q are both taken before every processor, so the figure compares distributions whatever
    the temperature of a request was.
    """
    picked = [trace for trace in traces if trainable_T(trace).any()]
    total, count = 0.0, 0
    for first in range(0, len(picked), _BATCH_TRACES):
        for trace, q_ND in _student(drafter, picked[first : first + _BATCH_TRACES]):
            rows_T = trainable_T(trace)
            ids_NK = torch.from_numpy(trace.topk.ids_TK[rows_T]).to(torch.int64)
            index_NK = torch.where(ids_NK >= 0, drafter.lookup_V()[ids_NK.clamp(min=0)], -1)
            q_NK = q_ND.gather(1, index_NK.clamp(min=0)).masked_fill(index_NK < 0, 0.0)
            p_NK = torch.from_numpy(trace.topk.logprobs_TK[rows_T]).exp()
            total += expected_acceptance(p_NK.numpy(), q_NK.numpy()) * len(p_NK)
            count += len(p_NK)
    return total / count if count else float("nan")


def _student(drafter: Drafter, group: Sequence[Trace]) -> list[tuple[Trace, torch.Tensor]]:
    """Each trace with the drafter's probabilities at its trainable positions."""
    model: Any = drafter.model
    keep = [trainable_T(trace) for trace in group]
    hidden = hidden_NC(model, make_inputs(group, keep))
    parts = hidden.split_with_sizes([int(keep_T.sum()) for keep_T in keep])
    return [
        (trace, model.lm_head(part).float().softmax(dim=1))
        for trace, part in zip(group, parts, strict=True)
    ]


def _usable(item: Opened) -> bool:
    return item.header.origin == Origin.SERVED and replayable(item.trace)


def _score(item: Opened, result: Replayed, lookahead: int) -> TraceScore:
    return TraceScore(
        trace_id=item.header.trace_id,
        request=item.header.request_id,
        domain=item.header.domain,
        accepted=float(result.accept_T.sum()),
        proposed=int(result.proposed_T.sum()),
        walk=walk_of(item.trace, result, lookahead),
    )


def walk_of(trace: Trace, result: Replayed, lookahead: int, *, budget: int | None = None) -> Walk:
    """The engine's counts on this trace at a fixed lookahead, expected ones without its noise.

    `budget` is the request's max_tokens, which a trace does not hold: without it an output that
    ended by itself counts as if there had been room for more. Positions past the last proposal,
    where the drafter's context was full, are plain steps.
    """
    if budget is None:
        by_length = trace.finish is Finish.LENGTH and not trace.output_cut
        budget = trace.positions if by_length else _UNKNOWN_BUDGET
    proposed = result.proposed_T.nonzero()[0]
    reach = int(proposed[-1]) + 1 if len(proposed) else 0
    plain = trace.positions - reach
    counted = walk(result.accept_T[:reach], lookahead, budget=budget)
    return counted + Walk(steps=plain, tokens=plain)
