"""Replay says of every tested position what the running engine did, and walks to its counts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from draftkeep.distill.evaluate import walk_of
from draftkeep.distill.replay import Replayed, replay
from draftkeep.ingest.trace import Finish, How, TopK, Trace
from draftkeep.kernels.measures import Walk
from draftkeep.kernels.noise import gumbel
from draftkeep.kernels.processors import process
from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine.drafting import DraftModel
from draftkeep.serve.engine.engine import Engine
from draftkeep.serve.engine.lookahead import Speculation
from draftkeep.serve.engine.request import Finished, Request
from draftkeep.store.models.drafter import Drafter
from draftkeep.store.models.drafter_network import build_network, copy_first_layers, drafter_config
from draftkeep.store.models.manifest import Manifest

VOCAB, EOS, CONTEXT = 40, 2, 64
NEAR = 1e-3
SAMPLINGS = (
    Sampling(temperature=0.0, eos_ids=(EOS,)),
    Sampling(temperature=0.8, eos_ids=(EOS,)),
    Sampling(temperature=1.1, top_p=0.9, top_k=12, eos_ids=(EOS,)),
    Sampling(temperature=0.0, repetition_penalty=1.3, eos_ids=(EOS,)),
    Sampling(temperature=0.7, presence_penalty=0.6, logit_bias=((EOS, 2.0),), eos_ids=(EOS,)),
)


def _target(seed: int, *, layers: int = 3) -> LlamaForCausalLM:
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
            initializer_range=0.5,
            tie_word_embeddings=True,
            pad_token_id=0,
            eos_token_id=EOS,
        )
        config._attn_implementation = "sdpa"
        model: Any = LlamaForCausalLM(config)
        made: LlamaForCausalLM = model.eval().requires_grad_(False)
        return made


def _drafter(source: LlamaForCausalLM, *, layers: int, vocab_ids: Tensor) -> Drafter:
    model = build_network(
        drafter_config(source.config, layers=layers),
        embedding_VC=source.model.embed_tokens.weight.detach().clone(),
        head_DC=source.lm_head.weight.detach()[vocab_ids].clone(),
    )
    copy_first_layers(source, model)
    return Drafter(
        model=model,
        vocab_ids=vocab_ids,
        digest=b"d" * 32,
        manifest=Manifest(target="", tokenizer="", layers=layers, vocab=len(vocab_ids)),
        tokenizer_dir=Path("unused"),
    )


def _kinds() -> dict[str, Drafter]:
    whole = torch.arange(VOCAB)
    return {
        "copy": _drafter(_target(1), layers=3, vocab_ids=whole),
        "first layers": _drafter(_target(1), layers=2, vocab_ids=whole),
        "trimmed": _drafter(_target(1), layers=2, vocab_ids=torch.arange(0, VOCAB, 2)),
        "random": _drafter(_target(9), layers=1, vocab_ids=whole),
    }


def _serve(drafter: Drafter, lookahead: int) -> list[Finished]:
    """Fifteen requests through the engine; its models are its own."""
    finished: list[Finished] = []
    engine = Engine(
        _target(1),
        slots=4,
        max_context=CONTEXT,
        speculation=Speculation(mode="fixed", lookahead=lookahead),
        capture_k=8,
        on_finish=finished.append,
    )
    engine.swap(DraftModel(model=drafter.model, vocab_ids=drafter.vocab_ids, digest=drafter.digest))
    rng = np.random.default_rng(4)
    for number in range(15):
        engine.submit(
            Request(
                request_id=str(number),
                prompt_ids=tuple(rng.integers(3, VOCAB, size=int(rng.integers(1, 9))).tolist()),
                sampling=SAMPLINGS[number % len(SAMPLINGS)],
                seed=1000 + number,
                max_tokens=int(rng.integers(1, 18)),
                on_tokens=lambda emission: None,
                on_error=_raise,
            )
        )
    while engine.step():
        pass
    engine.close()
    return finished


def _raise(error: Exception) -> None:
    raise error


def _trace(done: Finished) -> Trace:
    rows = len(done.output_ids_T)
    return Trace(
        prompt_ids_P=np.array(done.request.prompt_ids, np.int32),
        output_ids_T=done.output_ids_T,
        topk=TopK(
            ids_TK=done.ids_TK,
            logprobs_TK=done.logprobs_TK,
            k_T=np.full(rows, done.ids_TK.shape[1], np.uint8),
            tail_T=done.tail_T,
            tail_known_T=np.ones(rows, np.bool_),
        ),
        how_T=done.how_T,
        rejected_T=done.rejected_T,
        sampling=done.request.sampling,
        seed=done.request.seed,
        choice=done.request.choice,
        finish=Finish(int(done.finish)),
    )


def _near_tie(
    drafter: Drafter, trace: Trace, index: int, drafts: tuple[int, int], start: int = 0
) -> bool:
    """Whether these two proposals at a position are equally good up to rounding.

    `start` is where the drafter's own context begins.
    """
    ids = [*trace.prompt_ids_P.tolist(), *trace.output_ids_T[:index].tolist()][start:]
    logits_V = np.full(VOCAB, -np.inf, np.float32)
    with torch.inference_mode():
        logits_V[drafter.vocab_ids.numpy()] = drafter.model(torch.tensor([ids])).logits[0, -1]
    scores_V = process(
        logits_V,
        trace.sampling,
        prompt_ids=trace.prompt_ids_P.tolist(),
        output_ids=trace.output_ids_T[:index].tolist(),
    )
    if not trace.sampling.greedy:
        assert trace.seed is not None
        scores_V = scores_V + gumbel(trace.seed, trace.choice, index, VOCAB)
    return abs(float(scores_V[drafts[0]] - scores_V[drafts[1]])) < NEAR


@dataclass
class _Tally:
    """Tested positions compared, and those left out as near-ties."""

    compared: int = 0
    near: int = 0


def _hold(
    drafter: Drafter, trace: Trace, found: Replayed, index: int, tally: _Tally, start: int = 0
) -> bool:
    """Holds one position against the engine; False where it is a near-tie."""
    if trace.how_T[index] not in (How.ACCEPTED, How.CORRECTED):
        return True
    accepted = trace.how_T[index] == How.ACCEPTED
    drafted = int((trace.output_ids_T if accepted else trace.rejected_T)[index])
    replayed = int(found.draft_T[index])
    if drafted != replayed and _near_tie(drafter, trace, index, (drafted, replayed), start):
        tally.near += 1
        return False
    assert replayed == drafted
    assert found.accept_T[index] == accepted
    tally.compared += 1
    return True


def _compare(drafter: Drafter, done: Finished, tally: _Tally) -> bool:
    """Holds replay against the engine position by position; False where a near-tie was met."""
    trace = _trace(done)
    (found,) = replay(drafter, [trace], context=CONTEXT)
    assert found.proposed_T.all()
    return all([_hold(drafter, trace, found, i, tally) for i in range(trace.positions)])


@pytest.mark.parametrize("lookahead", [1, 3, 5])
@pytest.mark.parametrize("kind", ["copy", "first layers", "trimmed", "random"])
def test_replay_is_what_the_engine_did(kind: str, lookahead: int) -> None:
    finished = _serve(_kinds()[kind], lookahead)
    drafter = _kinds()[kind]
    assert len(finished) == 15
    tally = _Tally()
    engine = walked = Walk()
    for done in finished:
        if not _compare(drafter, done, tally):
            continue
        trace = _trace(done)
        (found,) = replay(drafter, [trace], context=CONTEXT)
        engine += Walk(
            steps=done.steps,
            tested=done.tested,
            accepted=done.accepted,
            tokens=trace.positions,
        )
        walked += walk_of(trace, found, lookahead, budget=done.request.max_tokens)
    assert walked == engine
    assert tally.near <= 2
    assert tally.compared > 40
    rates = {"copy": (0.97, 1.0), "random": (0.0, 0.4)}
    low, high = rates.get(kind, (0.1, 0.97))
    assert low <= engine.acceptance_rate <= high


def test_a_swap_in_the_middle_is_replayed_drafter_by_drafter() -> None:
    finished: list[Finished] = []
    kinds = {name: _kinds()[name] for name in ("first layers", "random")}
    engine = Engine(
        _target(1),
        slots=2,
        max_context=CONTEXT,
        speculation=Speculation(mode="fixed", lookahead=2),
        capture_k=8,
        on_finish=finished.append,
    )
    digests = {name: bytes([number]) * 32 for number, name in enumerate(kinds, start=1)}
    for number in range(4):
        engine.submit(
            Request(
                request_id=str(number),
                prompt_ids=(5, 7 + number, 9),
                sampling=Sampling(temperature=0.9, eos_ids=(EOS,), ignore_eos=True),
                seed=number,
                max_tokens=24,
                on_tokens=lambda emission: None,
                on_error=_raise,
            )
        )
    names = list(kinds)
    for step in range(200):
        if step % 4 == 0:
            name = names[step // 4 % 2]
            copy = _kinds()[name]
            engine.swap(
                DraftModel(model=copy.model, vocab_ids=copy.vocab_ids, digest=digests[name])
            )
        if not engine.step():
            break
    tally = _Tally()
    for done in finished:
        trace = _trace(done)
        position = 0
        assert len(done.drafters) > 1
        for use in done.drafters:
            name = next(n for n, digest in digests.items() if digest == use.digest)
            (found,) = replay(
                kinds[name], [trace], context=CONTEXT, context_start=use.context_start
            )
            for index in range(position, position + use.positions):
                _hold(kinds[name], trace, found, index, tally, use.context_start)
            position += use.positions
        assert position == trace.positions
    assert tally.compared > 40
    assert tally.near <= 1
