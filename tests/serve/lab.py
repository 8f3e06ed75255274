"""Tiny seeded models and an engine around them, and what their output must be."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from draftkeep.errors import DraftkeepError
from draftkeep.kernels.noise import gumbel
from draftkeep.kernels.processors import log_softmax64, process
from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine import decode_step
from draftkeep.serve.engine.drafting import DraftModel
from draftkeep.serve.engine.engine import Engine
from draftkeep.serve.engine.lookahead import Speculation
from draftkeep.serve.engine.request import Emission, Finish, Finished, Request, TokenLogprob
from draftkeep.serve.engine.row import Row
from draftkeep.serve.engine.verification import target_pass
from draftkeep.serve.passes.runner import ModelRunner
from tests.clock import Clock

# Where two ways of computing the same logits may pick either of the two best tokens.
NEAR_TIE = 1e-3


def generated(model: Any, prompt: Sequence[int], tokens: int) -> list[int]:
    """What transformers writes greedily behind the prompt."""
    ids = torch.tensor([list(prompt)])
    with torch.inference_mode():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            pad_token_id=0,
        )
    written: list[int] = out[0, len(prompt) :].tolist()
    return written


@dataclass
class Reply:
    """What a caller saw of one request."""

    request: Request
    tokens: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish: Finish | None = None
    error: DraftkeepError | None = None


class Lab:
    """Builds models and engines, runs requests, and judges whether two outputs are the same."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self._targets: dict[tuple[int, int, int], LlamaForCausalLM] = {}
        self.near_ties: list[float] = []

    def target(self, vocab: int = 48, seed: int = 0, context: int = 256) -> LlamaForCausalLM:
        """A plain model that nobody packs; engines get copies."""
        if (vocab, seed, context) not in self._targets:
            torch.manual_seed(seed)
            config = LlamaConfig(
                vocab_size=vocab,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=context,
                initializer_range=0.25,
                bos_token_id=None,
                eos_token_id=None,
                pad_token_id=None,
            )
            model = LlamaForCausalLM(config)
            model.train(False)
            model.set_attn_implementation("sdpa")
            self._targets[vocab, seed, context] = model
        return self._targets[vocab, seed, context]

    def drafter(self, kind: str, vocab: int = 48, seed: int = 0) -> DraftModel | None:
        """`copy`, `random`, `constant`, `trimmed` (every second id), `noisy` (close) or `none`."""
        if kind == "none":
            return None
        model = copy.deepcopy(self.target(vocab, seed + (1000 if kind == "random" else 0)))
        ids = torch.arange(vocab)
        with torch.no_grad():
            if kind == "constant":
                model.model.norm.weight.zero_()
            elif kind == "noisy":
                generator = torch.Generator().manual_seed(5)
                for weight in model.parameters():
                    weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.02)
            elif kind == "trimmed":
                ids = ids[::2]
                head = torch.nn.Linear(model.config.hidden_size, len(ids), bias=False)
                head.weight.copy_(model.lm_head.weight[ids])
                model.lm_head = head
        return DraftModel(model=model, vocab_ids=ids, digest=kind.encode().ljust(32, b"."))

    def engine(
        self,
        *,
        drafter: str | DraftModel | None = "none",
        lookahead: int = 4,
        slots: int = 8,
        vocab: int = 48,
        seed: int = 0,
        on_finish: Callable[[Finished], None] = lambda _: None,
        mode: str = "fixed",
        target: PreTrainedModel | None = None,
        **options: object,
    ) -> Engine:
        """An engine over a copy of the tiny target, plain weights unless asked otherwise."""
        settings: dict[str, object] = {"max_context": 128, "capture_k": 0, "packing": "never"}
        engine = Engine(
            copy.deepcopy(target or self.target(vocab, seed)),
            slots=slots,
            speculation=Speculation(mode=mode, lookahead=lookahead),  # type: ignore[arg-type]
            on_finish=on_finish,
            **(settings | options),  # type: ignore[arg-type]
        )
        loaded = self.drafter(drafter, vocab, seed) if isinstance(drafter, str) else drafter
        if loaded is not None:
            engine.swap(loaded)
        return engine

    def request(
        self,
        name: str,
        prompt: Sequence[int],
        *,
        max_tokens: int = 16,
        sampling: Sampling | None = None,
        seed: int = 0,
        **options: object,
    ) -> Reply:
        """A request whose callbacks fill the reply it comes with."""
        reply: Reply

        def on_tokens(emission: Emission) -> None:
            assert reply.finish is None
            reply.tokens += emission.tokens
            reply.calls.append(len(emission.tokens))
            reply.logprobs += emission.logprobs or ()
            reply.finish = emission.finish

        def on_error(error: DraftkeepError) -> None:
            reply.error = error

        reply = Reply(
            Request(
                request_id=name,
                prompt_ids=tuple(prompt),
                sampling=sampling or Sampling(temperature=0.0),
                seed=seed,
                max_tokens=max_tokens,
                on_tokens=on_tokens,
                on_error=on_error,
                **options,  # type: ignore[arg-type]
            )
        )
        return reply

    def step(self, engine: Engine, clock: Clock, *, seconds: float = 1.0) -> bool:
        """One step that takes that long by the engine's clock."""
        clock.now_s += seconds
        return engine.step()

    def step_with_nan(self, engine: Engine, monkeypatch: pytest.MonkeyPatch, *, row: int) -> None:
        """One step in whose target pass that row of the logits is no number."""

        def poisoned(runner: ModelRunner, rows: Sequence[Row]) -> torch.Tensor:
            logits_NV = target_pass(runner, rows).clone()
            logits_NV[row] = torch.nan
            return logits_NV

        with monkeypatch.context() as patch:
            patch.setattr(decode_step, "target_pass", poisoned)
            engine.step()

    def step_that_fails(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        """One step whose target pass fails."""

        def failing(runner: ModelRunner, rows: Sequence[Row]) -> torch.Tensor:
            raise RuntimeError("out of memory")

        with monkeypatch.context() as patch:
            patch.setattr(decode_step, "target_pass", failing)
            engine.step()

    def run(self, engine: Engine, replies: Sequence[Reply]) -> list[list[int]]:
        """Submit all, step to the end, return the outputs."""
        for reply in replies:
            engine.submit(reply.request)
        while engine.step():
            pass
        assert all(reply.error is None for reply in replies)
        return [reply.tokens for reply in replies]

    def prompts(self, lengths: Sequence[int], vocab: int = 48, seed: int = 3) -> list[list[int]]:
        """Seeded random prompts of those lengths."""
        rng = np.random.default_rng(seed)
        return [rng.integers(0, vocab, length).tolist() for length in lengths]

    def logits(self, tokens: Sequence[int], vocab: int = 48, seed: int = 0) -> np.ndarray:
        """Teacher-forced logits of the plain model after every token."""
        with torch.inference_mode():
            ids = torch.tensor([list(tokens)])
            out: np.ndarray = self.target(vocab, seed)(input_ids=ids, use_cache=False).logits[0]
            return out.numpy()  # type: ignore[attr-defined,no-any-return]

    def assert_same(self, reply: Reply, expected: Sequence[int], *, vocab: int = 48) -> None:
        """Equal outputs, or a first difference where the two best scores nearly tie."""
        got = reply.tokens
        if got == list(expected):
            return
        at = next(i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b)
        request = reply.request
        sampling, prompt = request.sampling, list(request.prompt_ids)
        row = self.logits(prompt + got[:at], vocab)[-1]
        scores = process(row, sampling, prompt_ids=prompt, output_ids=got[:at])
        if not sampling.greedy:
            noise = gumbel(request.seed, request.choice, at, vocab)
            scores = log_softmax64(scores) + noise
        best = np.sort(scores)[-2:]
        gap = float(best[1] - best[0])
        self.near_ties.append(gap)
        print(f"near-tie at output {at}: gap {gap:.2e}")
        assert gap < NEAR_TIE, f"outputs differ at {at} with a gap of {gap}"
