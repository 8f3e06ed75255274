"""Learner: one drafter, its optimiser, and one update at a time.

N: output positions of a batch; V: the target's vocabulary; D: the drafter's.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from draftkeep.distill.batch import hidden_NC, make_batch
from draftkeep.errors import ModelError, StoreError
from draftkeep.ingest.trace import Trace
from draftkeep.kernels.sparse_kd import forward_kl
from draftkeep.store.models.drafter import Drafter

_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.01
_GRADIENT_NORM = 1.0
_MOMENTS = ("exp_avg", "exp_avg_sq")
# Up to this many tokens a row, plain attention trains faster on a CPU than the fused kernel,
# whose backward pass is slow; beyond it the square matrix costs more than it saves.
_PLAIN_ATTENTION_TOKENS = 256


class Learner:
    """Changes the drafter's weights in place; its embeddings stay as they are."""

    def __init__(self, drafter: Drafter, *, bfloat16: bool) -> None:
        self._model: Any = drafter.model
        self._bfloat16 = bfloat16
        self._lookup_V = drafter.lookup_V()
        # Layers taken over from another network keep that one's config, and read attention from it.
        found = {id(m.config): m.config for m in self._model.modules() if hasattr(m, "config")}
        self._configs = list(found.values())
        self._weights = {n: p for n, p in self._model.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(
            self._weights.values(), betas=_BETAS, weight_decay=_WEIGHT_DECAY, fused=True
        )

    def update(self, traces: Sequence[Trace], *, rate: float) -> float:
        """One step on a batch of traces; returns its loss before the step, in nats a position.

        The loss is the mean over the trainable positions of the batch, each weighing the same
        whatever trace it is from. At least one position must be trainable. Raises ModelError, and
        changes nothing, where the loss is not finite.
        """
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._model.train()
        loss = self._loss(traces)
        value = float(loss.detach())
        if not math.isfinite(value):
            raise ModelError(
                f"the loss is {value}, expected a finite number; lower distill.learning_rate, or "
                "check the drafter the job started from"
            )
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._weights.values(), _GRADIENT_NORM)
        self._optimizer.step()
        return value

    @torch.inference_mode()
    def agreement(self, traces: Sequence[Trace]) -> float:
        """The share of trainable positions where the drafter's best token is the target's best."""
        self._model.eval()
        batch = make_batch(traces, self._lookup_V)
        with self._pass(batch.inputs.ids_BS.shape[1]):
            logits_ND = self._model.lm_head(hidden_NC(self._model, batch.inputs))
        # A best token outside the drafter's vocabulary is padding here, which nothing equals.
        agree_N = logits_ND.argmax(dim=1) == batch.ids_NK[:, 0]
        return float(agree_N.float().mean())

    def state(self, step: int) -> dict[str, Tensor]:
        """Weights and optimiser after `step` updates, by name."""
        tensors: dict[str, Tensor] = {}
        for name, weight in self._weights.items():
            tensors[f"weight.{name}"] = weight.detach()
            for moment in _MOMENTS if step else ():
                tensors[f"{moment}.{name}"] = self._optimizer.state[weight][moment]
        return tensors

    def restore(self, step: int, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `state(step)` gave; StoreError where it is of another network."""
        parts = ("weight", *(_MOMENTS if step else ()))
        expected = {f"{part}.{n}": w.shape for n, w in self._weights.items() for part in parts}
        if {name: tensor.shape for name, tensor in tensors.items()} != expected:
            raise StoreError(
                "the checkpoint holds another network than this job trains; delete the job's "
                "directory, it starts over"
            )
        with torch.no_grad():
            for name, weight in self._weights.items():
                weight.copy_(tensors[f"weight.{name}"])
                if step:
                    moments = {moment: tensors[f"{moment}.{name}"].clone() for moment in _MOMENTS}
                    self._optimizer.state[weight] = {"step": torch.tensor(float(step)), **moments}

    def rest(self) -> None:
        """Put the network back into evaluation mode."""
        self._model.eval()

    def _loss(self, traces: Sequence[Trace]) -> Tensor:
        batch = make_batch(traces, self._lookup_V)
        with self._pass(batch.inputs.ids_BS.shape[1]):
            logits_ND = self._model.lm_head(hidden_NC(self._model, batch.inputs))
        return forward_kl(logits_ND, batch.ids_NK, batch.logprobs_NK, batch.tail_N).mean()

    @contextmanager
    def _pass(self, tokens: int) -> Iterator[None]:
        """One pass in the chosen precision, with the attention that is fastest at this width."""
        before = [config._attn_implementation for config in self._configs]
        for config in self._configs:
            config._attn_implementation = "eager" if tokens <= _PLAIN_ATTENTION_TOKENS else "sdpa"
        try:
            with torch.autocast("cpu", torch.bfloat16, enabled=self._bfloat16):
                yield
        finally:
            for config, implementation in zip(self._configs, before, strict=True):
                config._attn_implementation = implementation
