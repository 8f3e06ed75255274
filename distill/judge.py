"""What a candidate measured, and the gate's word on it."""

import math
from collections.abc import Sequence
from dataclasses import replace

from draftkeep.distill.evaluate import Evaluation, paired, raw_expected_acceptance
from draftkeep.distill.result import JobResult
from draftkeep.distill.selection import Opened
from draftkeep.distill.workbench import Workbench
from draftkeep.kernels.measures import estimated_speed_up
from draftkeep.policies.gate import HIDDEN_DOMAIN, decide
from draftkeep.store.models.drafter import Drafter, cost_ratio


def judge(
    bench: Workbench,
    result: JobResult,
    candidate: Drafter,
    after: Evaluation,
    held_out: Sequence[Opened],
) -> JobResult:
    """The result with the candidate's evaluation, its measures and the gate's decision.

    The estimated speed-up takes the ratio of multiplied parameters for the cost of a draft.
    """
    speed_up = estimated_speed_up(
        after.walk.tokens_per_step, after.lookahead, cost_ratio(candidate, bench.target)
    )
    measures = {
        **result.measures,
        "replay": after.replay_acceptance,
        "tokens_per_step": after.walk.tokens_per_step,
        "lookahead": float(after.lookahead),
        "estimated_speed_up": speed_up,
        "raw_expected_acceptance": raw_expected_acceptance(
            candidate, [item.trace for item in held_out]
        ),
    }
    for name, part in after.by_domain().items():
        measures[f"replay.{HIDDEN_DOMAIN if name is None else name}"] = part.replay_acceptance
    gate = decide(
        paired(after, result.before) if result.before is not None else [],
        margin=bench.config.distill.gate_margin,
        min_requests=bench.config.distill.gate_min_held_out,
        speed_up=speed_up if math.isfinite(speed_up) else None,
    )
    return replace(result, after=after, gate=gate, measures=measures)
