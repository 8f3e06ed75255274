"""Replay of traces without noise, held against exact laws and against what the engine counted.

The engine serves under the rejection rule. What a draft's chance was is worked out a second time
from the plain models and the plain processors. Seeds are fixed, so the results are too: right
arithmetic stays within `RIGHT` standard errors and broken arithmetic is beyond `BROKEN`.

Shapes: V vocabulary.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from draftkeep.distill import replay as replay_module
from draftkeep.distill.evaluate import walk_of
from draftkeep.distill.replay import replay, replayable
from draftkeep.ingest.codec import decode_body, encode_body
from draftkeep.ingest.tables import RemapTable, only_identity
from draftkeep.ingest.trace import How, Trace
from draftkeep.kernels.processors import process
from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine.drafting import DraftModel
from draftkeep.serve.engine.request import Finished
from draftkeep.serve.to_trace import to_trace
from draftkeep.store.models.drafter import Drafter
from draftkeep.store.models.manifest import Manifest
from tests.faults.plain import scores
from tests.serve.lab import Lab

VOCAB, REQUESTS, TOKENS, CONTEXT = 16, 150, 14, 128
RIGHT, BROKEN = 3.5, 6.0
SAMPLINGS = (
    Sampling(temperature=0.6, top_p=0.85),
    Sampling(temperature=0.9, repetition_penalty=1.4, presence_penalty=0.8, frequency_penalty=0.4),
    Sampling(temperature=1.2, top_k=6, min_p=0.05),
)


@dataclass(frozen=True)
class _Served:
    """One request: its trace, the engine's counts, and what was true at each position.

    Of drafts after this prefix, `mean_T` are accepted; `chance_T` where the token was the logged
    one, whose variance over tokens is `variance_T`.
    """

    trace: Trace
    done: Finished
    mean_T: NDArray[np.float64]
    chance_T: NDArray[np.float64]
    variance_T: NDArray[np.float64]


@dataclass(frozen=True)
class _World:
    drafter: Drafter
    lookahead: int
    served: Sequence[_Served]


def _law(
    logits_V: NDArray[Any], sampling: Sampling, prompt: Sequence[int], output: Sequence[int]
) -> NDArray[np.float64]:
    weights_V = scores(logits_V, sampling, prompt, output)
    weights_V = np.exp(weights_V - weights_V.max())
    return np.asarray(weights_V / weights_V.sum())


@torch.inference_mode()
def _drafter_logits(drafter: Drafter, tokens: Sequence[int]) -> NDArray[Any]:
    model: Any = drafter.model
    found = model(input_ids=torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()
    rows = np.full((len(tokens), VOCAB), -np.inf)
    rows[:, drafter.vocab_ids.numpy()] = found
    return rows


def _truth(lab: Lab, drafter: Drafter, done: Finished) -> _Served:
    prompt, output = list(done.request.prompt_ids), done.output_ids_T.tolist()
    sampling, first = done.request.sampling, len(done.request.prompt_ids) - 1
    p_rows = lab.logits([*prompt, *output], VOCAB)[first:]
    q_rows = _drafter_logits(drafter, [*prompt, *output])[first:]
    mean, chance, variance = [], [], []
    for at, token in enumerate(output):
        p_V = _law(p_rows[at], sampling, prompt, output[:at])
        q_V = _law(q_rows[at], sampling, prompt, output[:at])
        both_V = np.minimum(p_V, q_V)
        mean.append(both_V.sum())
        chance.append(both_V[token] / p_V[token])
        live_V = p_V > 0
        variance.append((both_V[live_V] ** 2 / p_V[live_V]).sum() - both_V.sum() ** 2)
    made = to_trace(done, context_tokens=CONTEXT, chat_template_hash=b"h" * 32)
    trace = decode_body(encode_body(made, RemapTable.identity()), only_identity)
    return _Served(
        trace=trace,
        done=done,
        mean_T=np.array(mean),
        chance_T=np.array(chance),
        variance_T=np.array(variance),
    )


def _model(lab: Lab, kind: str) -> DraftModel:
    """A drafter close to the target, or another model that knows every second id."""
    model = lab.drafter("noisy" if kind == "close" else "random", VOCAB)
    assert model is not None
    if kind == "close":
        return model
    inner: Any = model.model
    ids = model.vocab_ids[::2]
    head = torch.nn.Linear(inner.config.hidden_size, len(ids), bias=False)
    head.weight.data = inner.lm_head.weight.data[ids]
    inner.lm_head = head
    return replace(model, vocab_ids=ids)


@cache
def _serve(kind: str, lookahead: int) -> _World:
    lab, finished = Lab(), list[Finished]()
    engine = lab.engine(
        drafter=_model(lab, kind),
        lookahead=lookahead,
        slots=50,
        queue=REQUESTS,
        vocab=VOCAB,
        verification="rejection",
        capture_k=4,
        on_finish=finished.append,
    )
    prompts = lab.prompts([2 + n % 5 for n in range(REQUESTS)], VOCAB)
    lab.run(
        engine,
        [
            lab.request(
                str(n), prompt, sampling=SAMPLINGS[n % len(SAMPLINGS)], seed=n, max_tokens=TOKENS
            )
            for n, prompt in enumerate(prompts)
        ],
    )
    model = _model(lab, kind)
    drafter = Drafter(
        model=model.model,
        vocab_ids=model.vocab_ids,
        digest=model.digest,
        manifest=Manifest(target="", tokenizer="", layers=2, vocab=len(model.vocab_ids)),
        tokenizer_dir=Path("unused"),
    )
    served = [_truth(lab, drafter, done) for done in finished]
    return _World(drafter=drafter, lookahead=lookahead, served=served)


@pytest.fixture(scope="module", params=[("close", 1), ("half", 1), ("close", 3)], ids=str)
def world(request: Any) -> _World:
    """Sampled requests of one drafter at one lookahead."""
    return _serve(*request.param)


def _standard_errors(world: _World) -> tuple[float, float]:
    """How far replay is from the exact acceptance, and from the engine's own outcomes.

    The first over every position, the second over the tested ones.
    """
    found = list(replay(world.drafter, [item.trace for item in world.served], context=CONTEXT))
    accept_N = np.concatenate([item.accept_T for item in found])
    mean_N = np.concatenate([item.mean_T for item in world.served])
    variance_N = np.concatenate([item.variance_T for item in world.served])
    how_N = np.concatenate([item.trace.how_T for item in world.served])
    chance_N = np.concatenate([item.chance_T for item in world.served])
    tested_N = np.isin(how_N, (How.ACCEPTED, How.CORRECTED))
    luck_N = (chance_N * (1 - chance_N))[tested_N]
    exact = (accept_N - mean_N).sum() / math.sqrt(variance_N.sum())
    engine = ((how_N == How.ACCEPTED) - accept_N)[tested_N].sum() / math.sqrt(luck_N.sum())
    return float(exact), float(engine)


def test_it_is_the_acceptance_of_the_two_laws_and_of_the_engine(world: _World) -> None:
    assert all(replayable(item.trace) and item.trace.seed is None for item in world.served)
    exact, engine = _standard_errors(world)
    print(f"{exact:+.2f} standard errors from sum min(p, q), {engine:+.2f} from the engine")
    assert abs(exact) < RIGHT
    assert abs(engine) < RIGHT


def test_each_chance_is_that_of_the_logged_token(world: _World) -> None:
    found = replay(world.drafter, [item.trace for item in world.served], context=CONTEXT)
    for item, replayed in zip(world.served, found, strict=True):
        assert replayed.proposed_T.all()
        np.testing.assert_allclose(replayed.accept_T, item.chance_T, atol=1e-3)


@pytest.mark.parametrize("count", ["steps", "tested", "accepted"])
def test_the_walk_expects_the_counts_of_the_engine(world: _World, count: str) -> None:
    found = replay(world.drafter, [item.trace for item in world.served], context=CONTEXT)
    gap_N = np.array(
        [
            getattr(item.done, count)
            - getattr(walk_of(item.trace, replayed, world.lookahead, budget=TOKENS), count)
            for item, replayed in zip(world.served, found, strict=True)
        ]
    )
    errors = gap_N.sum() / (gap_N.std() * math.sqrt(len(gap_N)))
    print(f"{count}: {errors:+.2f} standard errors")
    assert abs(errors) < RIGHT


def _raw(logits_V: Any, sampling: Any, **history: Any) -> Any:
    return logits_V.astype(np.float64)


def _forgets_the_output(logits_V: Any, sampling: Any, *, prompt_ids: Any, output_ids: Any) -> Any:
    return process(logits_V, sampling, prompt_ids=prompt_ids, output_ids=[])


BUGS: dict[str, tuple[str, Any]] = {
    "q before its processors": ("process", _raw),
    "penalties that forget the output": ("process", _forgets_the_output),
    "q up to a constant": ("log_softmax64", lambda scores_V: scores_V),
    "p/q": ("ratio_acceptance", lambda log_q, log_p: math.exp(min(log_p - log_q, 0.0))),
    "q/p beyond 1": ("ratio_acceptance", lambda log_q, log_p: math.exp(log_q - log_p)),
}


@pytest.mark.parametrize("bug", BUGS)
def test_broken_arithmetic_is_told(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    monkeypatch.setattr(replay_module, *BUGS[bug])
    exact, engine = _standard_errors(_serve("close", 1))
    print(f"{bug}: {exact:+.2f} standard errors from sum min(p, q), {engine:+.2f} from the engine")
    assert abs(exact) > BROKEN
    assert abs(engine) > BROKEN
