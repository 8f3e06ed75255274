"""JobResult: how a distillation job ended, in plain values."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from draftkeep.distill.evaluate import Evaluation
from draftkeep.policies.gate import HIDDEN_DOMAIN, GateResult


class JobStatus(StrEnum):
    """How a job ended. Only `admitted` changes what is served."""

    ADMITTED = "admitted"
    REFUSED = "refused"
    CONTAMINATED = "contaminated"
    INTERRUPTED = "interrupted"
    TOO_FEW_TRACES = "too_few_traces"
    SUPERSEDED = "superseded"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """How a job ended and what it measured.

    `drafter` is the digest of the drafter that was admitted. `before` and `after` are incumbent
    and candidate on the same held-out traces. `counts` and `measures` are plain numbers for the
    job's record; `skipped` counts traces that were left out, by reason.
    """

    job_id: str
    scope: str
    status: JobStatus
    drafter: bytes | None = None
    parent: bytes | None = None
    gate: GateResult | None = None
    before: Evaluation | None = None
    after: Evaluation | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)
    measures: Mapping[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """JSON values for a report: no content, no names but tenants' domain labels.

        `replay` holds {domain: {before, after}}; figures that cannot be told are null.
        """
        return {
            "job": self.job_id,
            "scope": self.scope,
            "status": str(self.status),
            "admitted": self.status is JobStatus.ADMITTED,
            "drafter": self.drafter.hex() if self.drafter else None,
            "parent": self.parent.hex() if self.parent else None,
            "reasons": list(self.gate.reasons) if self.gate else [],
            "replay": self._replay(),
            "counts": dict(self.counts),
            "skipped": dict(self.skipped),
            "measures": {name: number(value) for name, value in self.measures.items()},
        }

    def _replay(self) -> dict[str, dict[str, float | None]]:
        before = self.before.by_domain() if self.before else {}
        after = self.after.by_domain() if self.after else {}
        return {
            HIDDEN_DOMAIN if name is None else name: {
                "before": number(before[name].replay_acceptance) if name in before else None,
                "after": number(after[name].replay_acceptance) if name in after else None,
            }
            for name in [*before, *(name for name in after if name not in before)]
        }


def number(value: float) -> float | None:
    """The value, or None where it is not a number, which JSON cannot hold."""
    return value if math.isfinite(value) else None
