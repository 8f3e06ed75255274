"""DecodeStep: one step of the rows that are ready: draft, one target pass, judge, note."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from draftkeep.errors import DraftkeepError
from draftkeep.kernels.outcome import Verified
from draftkeep.serve.engine.logprobs import Logprobs, asked_logprobs
from draftkeep.serve.engine.recorder import Recorder
from draftkeep.serve.engine.row import Row
from draftkeep.serve.engine.speculator import Speculator
from draftkeep.serve.engine.verification import Verification, judge, target_pass
from draftkeep.serve.passes.runner import ModelRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoded:
    """What a step found: each row's verdict and log-probabilities, in the order of its rows.

    `drafter` is the digest of the drafter that was asked, `drafted` says whether it proposed.
    """

    verdicts: list[Verified | DraftkeepError]
    logprobs: list[Logprobs]
    drafter: bytes
    drafted: bool
    width: int
    draft_s: float
    verify_s: float


class DecodeStep:
    """The two models of an engine at work on one step after another."""

    def __init__(
        self,
        target: ModelRunner,
        speculator: Speculator,
        recorder: Recorder,
        *,
        verification: Verification,
        clock: Callable[[], float],
    ) -> None:
        self._target = target
        self._speculator = speculator
        self._recorder = recorder
        self._verification = verification
        self._clock = clock

    def run(self, rows: Sequence[Row]) -> Decoded:
        """Decide what every row emits; the rows have not taken it when this returns, and the
        recorder has noted it.

        Raises whatever a failing pass of the target raises.
        """
        draft_s = self._speculator.draft(rows)
        started = self._clock()
        logits_NV = target_pass(self._target, rows)
        if logits_NV.is_cuda:
            torch.cuda.current_stream(logits_NV.device).synchronize()
        verify_s = self._clock() - started
        verdicts = judge(logits_NV, rows, verification=self._verification)
        width = 1 + max(len(row.drafts) for row in rows)
        self._speculator.observe_pass(len(rows), width, self._clock() - started)
        logprobs = asked_logprobs(logits_NV, rows, verdicts)
        self._recorder.note(logits_NV, rows, verdicts)
        return Decoded(
            verdicts=verdicts,
            logprobs=logprobs,
            drafter=self._speculator.digest,
            drafted=any(row.drafts for row in rows),
            width=width,
            draft_s=draft_s,
            verify_s=verify_s,
        )
