"""transformers' own generate, in this process: plain greedy and assisted by the same drafter."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from bench.prompts import Prompt
from draftkeep.store.models.target import TargetModel

# How many tokens the assistant proposes: its own default, and constants.
SCHEDULES: tuple[tuple[str, int], ...] = (("default", 0), ("constant", 4), ("constant", 8))


def schedule_name(schedule: tuple[str, int]) -> str:
    """For rows and tables."""
    kind, length = schedule
    return f"assisted {kind} {length}".removesuffix(" 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """One prompt's output ids and the wall seconds of the whole call."""

    ids: list[int]
    seconds: float


class TransformersBaseline:
    """Greedy generation on a model of its own, one prompt at a time as assisted needs it."""

    def __init__(
        self,
        target: TargetModel,
        assistant_dir: Path,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._target = target
        self._clock = clock
        loaded: Any = AutoModelForCausalLM.from_pretrained(assistant_dir, dtype=torch.float32)
        self._assistant = loaded.eval()

    def plain(self, prompt: Prompt) -> Generated:
        """Greedy generation by the target alone."""
        return self._generate(prompt, {})

    def assisted(self, prompt: Prompt, schedule: tuple[str, int]) -> Generated:
        """Assisted generation; the schedule is a kind and, for `constant`, its length."""
        kind, length = schedule
        config = self._assistant.generation_config
        if kind == "constant":
            config.num_assistant_tokens_schedule = "constant"
            config.num_assistant_tokens = length
            # A threshold would end drafts early, which is the default schedule's business.
            config.assistant_confidence_threshold = 0.0
        else:
            fresh: Any = type(config)()
            for name in (
                "num_assistant_tokens",
                "num_assistant_tokens_schedule",
                "assistant_confidence_threshold",
            ):
                setattr(config, name, getattr(fresh, name, None))
        return self._generate(prompt, {"assistant_model": self._assistant})

    def _generate(self, prompt: Prompt, extra: dict[str, Any]) -> Generated:
        ids_BT = torch.tensor([prompt.ids])
        started_s = self._clock()
        with torch.inference_mode():
            output_BT = self._target.model.generate(
                input_ids=ids_BT,
                attention_mask=torch.ones_like(ids_BT),
                max_new_tokens=prompt.max_tokens,
                do_sample=False,
                pad_token_id=self._target.eos_ids[0],
                **extra,
            )
        seconds = self._clock() - started_s
        return Generated(ids=output_BT[0, len(prompt.ids) :].tolist(), seconds=seconds)
