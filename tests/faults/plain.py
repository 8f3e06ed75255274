"""What the output must be: the plain model, one full pass a token, with the rules written out.

Shapes: V vocabulary.
"""

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from draftkeep.kernels.noise import gumbel
from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine.drafting import DraftModel
from draftkeep.serve.engine.engine import Engine
from draftkeep.serve.engine.lookahead import Speculation


def scores(
    logits_V: NDArray[Any], sampling: Sampling, prompt: Sequence[int], output: Sequence[int]
) -> NDArray[np.float64]:
    """Log-weights of the next token under every sampling value; minus infinity where barred."""
    x = logits_V.astype(np.float64)
    for token, value in sampling.logit_bias:
        x[token] += value
    if len(output) < sampling.min_tokens:
        x[list(sampling.eos_ids + sampling.stop_ids)] = -np.inf
    for token in set(prompt) | set(output):
        x[token] = (
            x[token] / sampling.repetition_penalty
            if x[token] > 0
            else (x[token] * sampling.repetition_penalty)
        )
    for token in set(output):
        x[token] -= sampling.presence_penalty
        x[token] -= sampling.frequency_penalty * list(output).count(token)
    if sampling.temperature == 0:
        return x
    x = x / sampling.temperature
    order = sorted(range(len(x)), key=lambda token: (-x[token], token))
    p = np.exp(x - x.max())
    kept = [token for token in order if p[token] >= sampling.min_p * p.max()]
    kept = kept[: sampling.top_k or None]
    total, mass, nucleus = sum(p[token] for token in kept), 0.0, []
    for token in kept:
        if mass >= sampling.top_p * total:
            break
        nucleus.append(token)
        mass += p[token]
    barred = np.full_like(x, -np.inf)
    barred[nucleus] = x[nucleus]
    return barred


def plain_output(
    lab: Any, prompt: Sequence[int], sampling: Sampling, *, tokens: int, seed: int = 0
) -> list[int]:
    """The tokens of one request, each from a pass of its own over everything before it."""
    output: list[int] = []
    while len(output) < tokens:
        row = lab.logits([*prompt, *output])[-1]
        weights = scores(row, sampling, prompt, output)
        if sampling.temperature > 0:
            weights = weights + gumbel(seed, 0, len(output), len(weights))
        output.append(int(weights.argmax()))
        if output[-1] in sampling.stop_ids:
            break
        if output[-1] in sampling.eos_ids and not sampling.ignore_eos:
            break
    return output


def engine_over(
    model: PreTrainedModel,
    *,
    drafter: DraftModel | None = None,
    lookahead: int = 4,
    slots: int = 4,
    max_context: int = 128,
    **options: Any,
) -> Engine:
    """An engine over a copy of any model."""
    engine = Engine(
        copy.deepcopy(model),
        slots=slots,
        max_context=max_context,
        speculation=Speculation(mode="fixed", lookahead=lookahead),
        capture_k=0,
        on_finish=lambda _: None,
        packing="never",
        **options,
    )
    if drafter is not None:
        engine.swap(drafter)
    return engine
