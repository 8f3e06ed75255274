"""Toys for the distillation tests: a random decoder of 24 tokens and traces it served.

The traces are made by a plain loop over the target, one token at a time: no drafter, no cache.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftkeep.distill.selection import Opened
from draftkeep.ingest.header import Header
from draftkeep.ingest.trace import Finish, How, TopK, Trace
from draftkeep.kernels.coupled import choose, is_end
from draftkeep.kernels.noise import gumbel
from draftkeep.kernels.processors import process
from draftkeep.kernels.sampling import Sampling
from draftkeep.store.drafter import Drafter
from draftkeep.store.drafter_network import build_network, copy_first_layers, drafter_config
from draftkeep.store.manifest import Manifest

VOCAB = 24
EOS = 2
K = 6


def toy_target(seed: int = 0, *, layers: int = 2) -> LlamaForCausalLM:
    """A random decoder, sharp enough that its tokens differ."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
            initializer_range=0.6,
            tie_word_embeddings=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=EOS,
        )
        config._attn_implementation = "sdpa"
        return LlamaForCausalLM(config).eval().requires_grad_(False)


def toy_drafter(target: LlamaForCausalLM, *, layers: int, vocab_ids: Tensor) -> Drafter:
    """The target's first layers with a head over some of its ids; owns all its tensors."""
    model = build_network(
        drafter_config(target.config, layers=layers),
        embedding_VC=target.model.embed_tokens.weight.detach().clone(),
        head_DC=target.lm_head.weight.detach()[vocab_ids].clone(),
    )
    copy_first_layers(target, model)
    manifest = Manifest(
        target="00" * 32, tokenizer="00" * 32, layers=layers, vocab=len(vocab_ids)
    )
    return Drafter(
        model=model,
        vocab_ids=vocab_ids,
        digest=b"",
        manifest=manifest,
        tokenizer_dir=Path("unused"),
    )


@torch.inference_mode()
def serve(
    target: LlamaForCausalLM,
    prompt: list[int],
    *,
    sampling: Sampling,
    max_tokens: int,
    seed: int = 7,
    choice: int = 0,
    held_out: bool = False,
) -> Trace:
    """The trace of one request, served without speculation."""
    output: list[int] = []
    rows: list[Tensor] = []
    finish = Finish.LENGTH
    while len(output) < max_tokens:
        logits_V = target(torch.tensor([[*prompt, *output]])).logits[0, -1].float()
        scores_V = process(
            logits_V.numpy(), sampling, prompt_ids=prompt, output_ids=output
        )
        noise_V = None if sampling.greedy else gumbel(seed, choice, len(output), VOCAB)
        output.append(choose(scores_V, noise_V))
        rows.append(logits_V)
        if is_end(output[-1], sampling):
            finish = Finish.STOP
            break
    return make_trace(
        prompt,
        output,
        torch.stack(rows),
        sampling=sampling,
        seed=seed,
        choice=choice,
        finish=finish,
        held_out=held_out,
    )


def make_trace(
    prompt: list[int],
    output: list[int],
    logits_TV: Tensor,
    *,
    sampling: Sampling,
    seed: int | None = 7,
    choice: int = 0,
    finish: Finish = Finish.LENGTH,
    held_out: bool = False,
    k: int = K,
) -> Trace:
    """A trace with the top k of these logits at each position and the exact tail."""
    logp_TV = logits_TV.double().log_softmax(dim=1)
    ordered = torch.sort(logp_TV, dim=1, descending=True, stable=True)
    count = len(output)
    tail_T = torch.logsumexp(ordered.values[:, k:], dim=1)
    return Trace(
        prompt_ids_P=np.array(prompt, np.int32),
        output_ids_T=np.array(output, np.int32),
        topk=TopK(
            ids_TK=ordered.indices[:, :k].numpy().astype(np.int32),
            logprobs_TK=ordered.values[:, :k].numpy().astype(np.float32),
            k_T=np.full(count, min(k, logits_TV.shape[1]), np.uint8),
            tail_T=tail_T.numpy().astype(np.float32),
            tail_known_T=np.ones(count, np.bool_),
        ),
        how_T=np.full(count, How.PLAIN, np.uint8),
        rejected_T=np.full(count, -1, np.int32),
        sampling=sampling,
        seed=seed,
        choice=choice,
        finish=finish,
        held_out=held_out,
    )


def opened(trace: Trace, number: int, *, domain: str | None = "sql", origin: int = 0) -> Opened:
    """The trace under a header of its own; `number` makes ids."""
    name = number.to_bytes(16, "big")
    header = Header(
        version=1,
        trace_id=name,
        request_id=name,
        tenant="acme",
        period_id=bytes(16),
        alias=name,
        subject_kind=1,
        share_id=bytes(16),
        target=bytes(32),
        tokenizer=bytes(32),
        node="node-1",
        created_s=100,
        expiry_s=1000,
        consent=0,
        policy_version=1,
        origin=origin,
        parent_trace_id=None,
        domain=domain,
        prompt_tokens=len(trace.prompt_ids_P),
        positions=trace.positions,
        body_bytes=0,
        ext=b"",
    )
    return Opened(header=header, trace=trace)


GREEDY = Sampling(temperature=0.0, eos_ids=(EOS,))
Traces = Callable[..., list[Opened]]


@pytest.fixture(scope="session")
def target() -> LlamaForCausalLM:
    """One toy target, never changed."""
    return toy_target()


@pytest.fixture(scope="session")
def corpus(target: LlamaForCausalLM) -> list[Opened]:
    """24 short traces, a third of them sampled."""
    rng = np.random.default_rng(3)
    found = []
    for number in range(24):
        prompt = rng.integers(3, VOCAB, size=int(rng.integers(2, 7))).tolist()
        sampling = Sampling(temperature=0.8, eos_ids=(EOS,)) if number % 3 == 0 else GREEDY
        trace = serve(target, prompt, sampling=sampling, max_tokens=8, seed=number)
        found.append(opened(trace, number))
    return found
