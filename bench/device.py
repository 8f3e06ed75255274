"""Checks and times every kernel, passes as CUDA graphs and the engine on one device.

    python -m bench.device [--device cuda] [--full]

Needs torch, transformers and numpy, and of draftkeep only kernels and the engine. Every kernel is
compared with a float64 reference before it is timed; a wrong one ends the run with status 1.
`--full` uses the sizes of a real service. Times are medians; ratios are against plain torch in the
same run. Rows go to bench/results/device.jsonl.

Shapes: N positions, V vocabulary, K entries of the list.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from bench.results import Row, append_rows
from draftkeep.errors import DraftkeepError
from draftkeep.kernels.coupled import verify
from draftkeep.kernels.noise import ACCEPT, RECOVERY, gumbel, uniform
from draftkeep.kernels.outcome import Verified
from draftkeep.kernels.processors import log_softmax64
from draftkeep.kernels.rejection import verify_rejection
from draftkeep.kernels.sampling import Sampling
from draftkeep.kernels.sparse_kd import forward_kl
from draftkeep.kernels.topk import argmax, topk_lse
from draftkeep.serve.engine.drafting import DraftModel
from draftkeep.serve.engine.engine import Engine
from draftkeep.serve.engine.lookahead import Speculation
from draftkeep.serve.engine.request import Emission, Request
from draftkeep.serve.passes.rectangle import Segment
from draftkeep.serve.passes.runner import ModelRunner

REPEATS = 20
TOP_K = 32


def main() -> int:
    """Run everything; 0 where every check held."""
    parser = argparse.ArgumentParser(description="Check and time kernels and engine.")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--full", action="store_true")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    rows: list[Row] = []
    failed = []
    checks = (check_topk, check_forward_kl, check_rules, check_passes, check_engine)
    for check in checks:
        try:
            found = check(device, full=arguments.full)
        except (AssertionError, DraftkeepError) as error:
            failed.append(check.__name__)
            print(f"FAILED {check.__name__}: {error}")
            continue
        rows += found
        for row in found:
            print(f"{row.metric:32} {row.value:12.4g} {row.unit:10} {row.against}")
    append_rows(
        "device",
        rows,
        conditions={"device": _name(device), "full": arguments.full},
        packages=("torch", "transformers", "numpy"),
        clock=time.time,
    )
    return 1 if failed else 0


def check_topk(device: torch.device, *, full: bool) -> list[Row]:
    """Top-k with log-sum-exp and argmax against float64, timed against torch's own."""
    shape = (64, 128_256) if full else (8, 49_152)
    logits_NV = 3 * torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    found = topk_lse(logits_NV, TOP_K)
    exact_NV = logits_NV.double().log_softmax(-1)
    expected_NK = exact_NV.topk(TOP_K, -1).values
    outside_NV = exact_NV.scatter(-1, found.ids_NK, -torch.inf)
    _close("log-probabilities", found.logprobs_NK, expected_NK, 1e-5)
    if not torch.equal(argmax(logits_NV)[0], logits_NV.argmax(-1)):
        raise AssertionError("argmax differs from torch's")
    _close("tail", found.tail_N, outside_NV.logsumexp(-1), 1e-5)

    def plain() -> None:
        logits_NV.topk(TOP_K, -1)
        logits_NV.logsumexp(-1)

    ours_s = _median_s(lambda: topk_lse(logits_NV, TOP_K), device)
    return [
        Row(metric="topk_lse_ms", value=1e3 * ours_s, unit="ms"),
        Row(
            metric="topk_lse_ratio",
            value=ours_s / _median_s(plain, device),
            unit="ratio",
            against="torch.topk and logsumexp",
        ),
    ]


def check_forward_kl(device: torch.device, *, full: bool) -> list[Row]:
    """The sparse loss and its gradient against float64 autograd, timed against log_softmax."""
    positions, vocab = (8192, 128_256) if full else (512, 8192)
    generator = torch.Generator().manual_seed(1)
    _check_gradient(device, generator)
    teacher = topk_lse(3 * torch.randn((positions, 4096), generator=generator).to(device), TOP_K)
    logits_NV = torch.randn((positions, vocab), generator=generator).to(device).requires_grad_()

    def ours() -> None:
        loss_N = forward_kl(logits_NV, teacher.ids_NK, teacher.logprobs_NK, teacher.tail_N)
        torch.autograd.grad(loss_N.sum(), logits_NV)

    def plain() -> None:
        loss_NK = -logits_NV.log_softmax(-1).gather(-1, teacher.ids_NK)
        torch.autograd.grad(loss_NK.sum(), logits_NV)

    ours_s = _median_s(ours, device)
    return [
        Row(metric="forward_kl_ms", value=1e3 * ours_s, unit="ms"),
        Row(
            metric="forward_kl_ratio",
            value=ours_s / _median_s(plain, device),
            unit="ratio",
            against="log_softmax, gather and backward",
        ),
    ]


def _check_gradient(device: torch.device, generator: torch.Generator) -> None:
    teacher = topk_lse(3 * torch.randn((32, 512), generator=generator).to(device), TOP_K)
    logits_NV = torch.randn((32, 512), generator=generator).to(device).requires_grad_()
    exact_NV = logits_NV.detach().double().requires_grad_()
    loss_N = forward_kl(logits_NV, teacher.ids_NK, teacher.logprobs_NK, teacher.tail_N)
    (gradient_NV,) = torch.autograd.grad(loss_N.sum(), logits_NV)
    log_q_NV = exact_NV.log_softmax(-1)
    tail_q_N = log_q_NV.scatter(-1, teacher.ids_NK, -torch.inf).logsumexp(-1)
    log_p_NK, log_t_N = teacher.logprobs_NK.double(), teacher.tail_N.double()
    expected_N = (log_p_NK.exp() * (log_p_NK - log_q_NV.gather(-1, teacher.ids_NK))).sum(-1)
    expected_N = expected_N + log_t_N.exp() * (log_t_N - tail_q_N)
    (expected_NV,) = torch.autograd.grad(expected_N.sum(), exact_NV)
    _close("loss", loss_N.detach(), expected_N.detach(), 1e-4)
    _close("gradient", gradient_NV, expected_NV, 1e-5)


def check_rules(device: torch.device, *, full: bool) -> list[Row]:
    """Both verification rules on this machine's processor: certain cases, then their time.

    They run on the host beside any device: one row of noise and one draw a position.
    """
    vocab, depth = (128_256 if full else 8192), 4
    draw = np.random.default_rng(2)
    logits_WV = draw.normal(scale=3, size=(depth + 1, vocab)).astype(np.float32)
    sampling = Sampling(temperature=1.0)

    def coupled(drafts: list[int]) -> Verified:
        return verify(
            logits_WV,
            drafts,
            sampling,
            prompt_ids=(1,),
            output_ids=(),
            noise=lambda index: gumbel(7, 0, index, vocab),
        )

    def rejection(drafts: list[int], laws: list[NDArray[np.float64] | None]) -> Verified:
        return verify_rejection(
            logits_WV,
            drafts,
            laws,
            sampling,
            prompt_ids=(1,),
            output_ids=(),
            uniform=lambda index: uniform(7, 0, index, ACCEPT),
            noise=lambda index: gumbel(7, 0, index, vocab, RECOVERY),
        )

    log_p_WV = [log_softmax64(row) for row in logits_WV]
    expected = [
        int((log_p_V + gumbel(7, 0, at, vocab)).argmax()) for at, log_p_V in enumerate(log_p_WV)
    ]
    if list(coupled(expected[:depth]).tokens) != expected:
        raise AssertionError("the coupled rule does not accept its own draws")
    drafts = expected[:depth]
    if rejection(drafts, [*log_p_WV[:depth]]).accepted != depth:
        raise AssertionError("the rejection rule rejects a drafter that equals the target")
    host = torch.device("cpu")
    coupled_s = _median_s(lambda: coupled(drafts), host)
    rejection_s = _median_s(lambda: rejection(drafts, [*log_p_WV[:depth]]), host)
    noise_s = _median_s(lambda: gumbel(7, 0, 0, vocab), host)
    return [
        Row(metric="noise_row_ms", value=1e3 * noise_s, unit="ms"),
        Row(metric="coupled_5_positions_ms", value=1e3 * coupled_s, unit="ms"),
        Row(metric="rejection_5_positions_ms", value=1e3 * rejection_s, unit="ms"),
    ]


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
            _close(f"logits of {batch} rows of {width}", found, expected, 1e-3)
            ragged_s = _median_s(partial(ragged.forward, segments), device)
            fixed_s = _median_s(partial(fixed.forward, segments), device)
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
        capture_k=TOP_K,
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


def _median_s(work: Callable[[], object], device: torch.device) -> float:
    times = []
    for _ in range(REPEATS):
        _synchronise(device)
        started = time.perf_counter()
        work()
        _synchronise(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _close(what: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
    gap = float(np.abs((found.double() - expected.double()).cpu().numpy()).max())
    if not gap <= tolerance:
        raise AssertionError(f"{what} differ by {gap:.3g}, allowed {tolerance:g}")


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


if __name__ == "__main__":
    sys.exit(main())
