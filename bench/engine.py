"""The engine as the bench drives it: prompts in, answers, times and step reports out."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.prompts import Prompt
from draftkeep.errors import DraftkeepError
from draftkeep.serve.engine.drafting import DraftModel
from draftkeep.serve.engine.engine import Engine
from draftkeep.serve.engine.lookahead import Speculation
from draftkeep.serve.engine.request import Finished, Request, StepReport
from draftkeep.store.models.target import TargetModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What a batch of prompts took: wall seconds with prefill, answers in the prompts' order."""

    seconds: float
    answers: tuple[Finished, ...]
    reports: tuple[StepReport, ...]

    @property
    def passes(self) -> int:
        """Passes of the target each answer took part in, summed."""
        return sum(answer.steps for answer in self.answers)

    @property
    def decoded(self) -> tuple[int, float]:
        """Tokens after each answer's first step, which may bring several, and their seconds."""
        return (
            sum(row.emitted for step in self.reports for row in step.rows if not row.first),
            sum(answer.finished_s - answer.first_s for answer in self.answers),
        )

    @property
    def ids(self) -> list[list[int]]:
        """Output token ids, answer by answer."""
        return [answer.output_ids_T.tolist() for answer in self.answers]


class BenchEngine:
    """An engine of the bench's own, stepped in the caller's thread.

    It takes `target.model` over: load another copy for anything else.
    """

    def __init__(
        self,
        target: TargetModel,
        *,
        slots: int,
        max_context: int,
        capture_k: int = 32,
        speculation: Speculation | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._finished: dict[str, Finished] = {}
        self._reports: list[StepReport] = []
        self._number = 0
        self._on_finish: Callable[[Finished], None] = _ignore
        self.engine = Engine(
            target.model,
            slots=slots,
            max_context=max_context,
            speculation=speculation or Speculation(mode="auto", lookahead=8),
            capture_k=capture_k,
            on_finish=self._keep,
            on_step=self._reports.append,
            queue=4096,
            clock=clock,
        )

    def use(self, drafter: DraftModel) -> None:
        """Draft with this drafter, which the engine takes over, from the next step on."""
        self.engine.swap(drafter)

    def use_export(self, directory: Path) -> None:
        """Draft with a full-vocabulary export, the form that other engines load."""
        model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        vocab_ids = torch.arange(int(model.config.vocab_size))
        self.use(DraftModel(model=model.eval(), vocab_ids=vocab_ids, digest=bytes(32)))

    def serve(
        self,
        prompts: Sequence[Prompt],
        *,
        speculation: Speculation | None = None,
        capture: bool = True,
        tag: Callable[[], object] = lambda: None,
        on_finish: Callable[[Finished], None] | None = None,
    ) -> Served:
        """Serve all prompts, as many at a time as there are slots. Raises what a request raises.

        `tag` makes each request's tag; `on_finish` hears of each answer in the engine's own step.
        """
        self._on_finish = on_finish or _ignore
        if speculation is not None:
            self.engine.set_speculation(speculation)
        self._finished.clear()
        self._reports.clear()
        started_s = self._clock()
        names = [self._submit(prompt, capture, tag()) for prompt in prompts]
        while self.engine.step():
            pass
        return Served(
            seconds=self._clock() - started_s,
            answers=tuple(self._finished[name] for name in names),
            reports=tuple(self._reports),
        )

    def _submit(self, prompt: Prompt, capture: bool, tag: object) -> str:
        self._number += 1
        name = f"bench-{self._number}"
        self.engine.submit(
            Request(
                request_id=name,
                prompt_ids=prompt.ids,
                sampling=prompt.sampling,
                seed=prompt.seed,
                max_tokens=prompt.max_tokens,
                on_tokens=lambda emission: None,
                on_error=_raise,
                group=prompt.domain,
                capture=capture,
                tag=tag,
            )
        )
        return name

    def _keep(self, finished: Finished) -> None:
        self._finished[finished.request.request_id] = finished
        self._on_finish(finished)


def _ignore(finished: Finished) -> None:
    pass


def _raise(error: DraftkeepError) -> None:
    raise error
