"""Passes and the engine on one device: equal output by different ways, then their times."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from bench.device.timing import close, median_s
from bench.results import Row
from draftkeep.errors import DraftkeepError
from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine.drafting import DraftModel
from draftkeep.serve.engine.engine import Engine
from draftkeep.serve.engine.lookahead import Speculation
from draftkeep.serve.engine.request import Emission, Request
from draftkeep.serve.passes.rectangle import Segment
from draftkeep.serve.passes.runner import ModelRunner

CAPTURE_K = 32


def check_passes(device: torch.device, *, full: bool) -> list[Row]:
    """Passes at fixed shapes, graphs on a GPU, against ragged ones: equality, then time."""
    problems: list[BaseException] = []
    ragged, fixed = (
        ModelRunner(
            _llama(device, full=full),
            slots=8,
            context=256,
            graphs=graphs,
            on_problem=lambda kind, error: problems.append(error),
        )
        for graphs in ("never", "fixed")
    )
    rows = []
    for width in (1, 5, 9):
        for batch in (1, 8):
            segments = [
                Segment(slot=slot, tokens=list(range(3, 3 + width)), start=90 + slot, want=width)
                for slot in range(batch)
            ]
            for runner in (ragged, fixed):
                prompt = [Segment(slot=s, tokens=list(range(1, 100)), start=0) for s in range(8)]
                runner.prefill(prompt)
            expected, found = (runner.forward(segments) for runner in (ragged, fixed))
            close(f"logits of {batch} rows of {width}", found, expected, 1e-3)
            ragged_s = median_s(partial(ragged.forward, segments), device)
            fixed_s = median_s(partial(fixed.forward, segments), device)
            name = f"pass_{batch}x{width}"
            rows += [
                Row(metric=f"{name}_ms", value=1e3 * fixed_s, unit="ms"),
                Row(
                    metric=f"{name}_ratio", value=fixed_s / ragged_s, unit="ratio", against="ragged"
                ),
            ]
    if problems:
        raise AssertionError(f"a graph was not captured: {problems[0]}")
    return rows


def check_engine(device: torch.device, *, full: bool) -> list[Row]:
    """Sampled output must not depend on a drafter; tokens a second with and without one."""
    model, copy = (_llama(device, full=full) for _ in range(2))
    drafter = DraftModel(
        model=copy,
        vocab_ids=torch.arange(model.config.vocab_size),
        digest=b"d" * 32,
    )
    engine = Engine(
        model,
        slots=8,
        max_context=256,
        speculation=Speculation(mode="fixed", lookahead=4),
        capture_k=CAPTURE_K,
        on_finish=lambda finished: None,
    )
    _generate(engine)  # the first pass compiles and allocates
    plain, plain_s = _generate(engine)
    engine.swap(drafter)
    drafted, drafted_s = _generate(engine)
    if plain != drafted:
        raise AssertionError("a drafter changed the output")
    tokens = sum(len(ids) for ids in plain)
    return [
        Row(metric="engine_plain_tokens_per_s", value=tokens / plain_s, unit="tokens/s"),
        Row(
            metric="engine_copy_drafter_ratio",
            value=plain_s / drafted_s,
            unit="ratio",
            against="the same engine without a drafter (the drafter is a full copy)",
        ),
    ]


def _llama(device: torch.device, *, full: bool) -> PreTrainedModel:
    """The same seeded toy at every call."""
    torch.manual_seed(3)
    hidden = 1024 if full else 128
    config = LlamaConfig(
        vocab_size=8192,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=16 if full else 4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
    )
    config._attn_implementation = "sdpa"
    model: Any = LlamaForCausalLM(config)
    return cast(PreTrainedModel, model.eval().to(device))


def _generate(engine: Engine) -> tuple[list[list[int]], float]:
    """Eight sampled requests of 48 tokens, and the seconds they took."""
    outputs: list[list[int]] = [[] for _ in range(8)]

    def keep(index: int) -> Callable[[Emission], None]:
        return lambda emission: outputs[index].extend(emission.tokens)

    def fail(error: DraftkeepError) -> None:
        raise error

    started = time.perf_counter()
    for index in range(8):
        engine.submit(
            Request(
                request_id=f"r{index}",
                prompt_ids=tuple(range(1, 20 + index)),
                sampling=Sampling(temperature=0.8),
                seed=index,
                max_tokens=48,
                on_tokens=keep(index),
                on_error=fail,
            )
        )
    while engine.step():
        pass
    return outputs, time.perf_counter() - started
