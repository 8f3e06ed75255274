"""Sampled output follows the target's exact joint law, and broken rules are caught by the test.

The law of three tokens over five ids is enumerated from the plain model by code that shares nothing
with the engine. A chi-square test compares it with many seeds through the real engine. Seeds are
fixed, so the result is too: a right rule must give p > 1e-3 and a broken one p < 1e-6.
"""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from draftkeep.kernels.coupled import Verified, choose, verify
from draftkeep.kernels.noise import GumbelRow
from draftkeep.kernels.processors import process
from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine import row as row_module
from draftkeep.serve.engine import verification
from draftkeep.serve.engine.ngram import NgramDrafter

VOCAB, TOKENS, SAMPLES = 5, 3, 2000
PROMPT = (2, 0, 3)
RIGHT, BROKEN = 1e-3, 1e-6
CASES = {
    "t0.5": Sampling(temperature=0.5),
    "t1": Sampling(temperature=1.0),
    "t1.5": Sampling(temperature=1.5),
    "top-p": Sampling(temperature=1.0, top_p=0.7),
}


def _distribution(logits: Any, sampling: Any) -> Any:
    """Temperature and top-p written out plainly."""
    weights = np.exp((logits - logits.max()).astype(np.float64) / sampling.temperature)
    p = weights / weights.sum()
    order = np.argsort(-p, kind="stable")
    keep = np.cumsum(p[order]) - p[order] < sampling.top_p
    kept = np.zeros_like(p)
    kept[order[keep]] = p[order[keep]]
    return kept / kept.sum()


def _law(lab: Any, sampling: Any) -> Any:
    """Probability of every sequence of `TOKENS` ids."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        prefixes = list(law)
        with torch.inference_mode():
            ids = torch.tensor([PROMPT + prefix for prefix in prefixes])
            rows = lab.target(VOCAB)(input_ids=ids, use_cache=False).logits[:, -1].numpy()
        law = {
            (*prefix, token): law[prefix] * share
            for prefix, logits in zip(prefixes, rows, strict=True)
            for token, share in enumerate(_distribution(logits, sampling))
        }
    return law


def _p_value(
    lab: Any, sampling: Any, *, drafter: Any = "noisy", samples: Any = SAMPLES, **options: Any
) -> Any:
    """Chi-square of the engine's outputs over `samples` seeds against the law."""
    if drafter == "n-gram":
        options["floor"], drafter = NgramDrafter(2, 1), "none"
    engine = lab.engine(
        vocab=VOCAB, drafter=drafter, lookahead=2, slots=64, queue=samples, **options
    )
    replies = [
        lab.request(str(seed), PROMPT, max_tokens=TOKENS, sampling=sampling, seed=seed)
        for seed in range(samples)
    ]
    outputs = [tuple(tokens) for tokens in lab.run(engine, replies)]
    law = _law(lab, sampling)
    if any(law[output] == 0.0 for output in outputs):
        return 0.0
    cells = sorted((key for key in law if law[key] > 0), key=law.__getitem__)
    expected = np.array([law[cell] * samples for cell in cells])
    counts = Counter(outputs)
    seen = np.array([counts[cell] for cell in cells], float)
    return _pooled(seen, expected)


def _pooled(seen: Any, expected: Any, least: Any = 8.0) -> Any:
    """The test over cells merged until each expects `least`; cells come in rising expectation."""
    edges, total = [0], 0.0
    for index, value in enumerate(expected):
        total += value
        if total >= least:
            edges.append(index + 1)
            total = 0.0
    starts = edges[:-1]
    seen, expected = np.add.reduceat(seen, starts), np.add.reduceat(expected, starts)
    assert len(expected) > 5
    return stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue


@pytest.mark.parametrize("case", CASES)
def test_the_engine_draws_from_the_targets_law(lab: Any, case: Any) -> None:
    p_value = _p_value(lab, CASES[case])
    print(f"{case}: p {p_value:.3f}")
    assert p_value > RIGHT


@pytest.mark.parametrize("drafter", ["noisy", "random", "n-gram"])
@pytest.mark.parametrize("case", ["t1", "top-p"])
def test_the_rejection_rule_draws_from_it_too(lab: Any, case: Any, drafter: Any) -> None:
    p_value = _p_value(lab, CASES[case], drafter=drafter, verification="rejection")
    print(f"{case}, {drafter}: p {p_value:.3f}")
    assert p_value > RIGHT


def test_an_unrelated_drafter_changes_nothing(lab: Any) -> None:
    assert _p_value(lab, CASES["t1"], drafter="random") > RIGHT


def _drafts_are_emitted(logits_WV: Any, drafts: Any, sampling: Any, **kwargs: Any) -> Any:
    """q in place of p: every draft is taken as it is."""
    fair = verify(logits_WV[-1:], [], sampling, **(kwargs | _later(kwargs, drafts)))
    return Verified(tokens=(*drafts, *fair.tokens), accepted=len(drafts), tested=len(drafts))


def _later(kwargs: Any, drafts: Any) -> Any:
    return {"output_ids": [*kwargs["output_ids"], *drafts]}


def _hot(logits_WV: Any, drafts: Any, sampling: Any, **kwargs: Any) -> Any:
    """The temperature is forgotten by the target."""
    return verify(logits_WV, drafts, Sampling(), **kwargs)


def _ratio_without_residual(
    logits_WV: Any, drafts: Any, sampling: Any, *, prompt_ids: Any, output_ids: Any, noise: Any
) -> Any:
    """Accepts with probability p(draft) and otherwise draws from p again, not from the rest."""
    tokens = []
    for row, logits_V in enumerate(logits_WV):
        scores_V = process(logits_V, sampling, prompt_ids=prompt_ids, output_ids=output_ids)
        noise_V = noise(len(output_ids) + row).all()
        p_V = np.exp(scores_V) / np.exp(scores_V).sum()
        coin = np.exp(-np.exp(-noise_V[0]))
        if row < len(drafts) and coin < p_V[drafts[row]] * 1.5:
            tokens.append(drafts[row])
            continue
        tokens.append(choose(scores_V, noise_V))
        break
    accepted = len(tokens) - 1 if len(tokens) <= len(drafts) else len(drafts)
    return Verified(tokens=tuple(tokens), accepted=accepted, tested=min(len(tokens), len(drafts)))


def _same_noise_twice(seed: Any, choice: Any, index: Any, vocab: Any) -> Any:
    """The index lags by one, so the second token reuses the first one's noise."""
    return GumbelRow(seed, choice, max(index - 1, 0), vocab)


BUGS = {
    "drafts emitted": (verification, "verify", _drafts_are_emitted, "random", "t0.5"),
    "temperature forgotten": (verification, "verify", _hot, "noisy", "t0.5"),
    "ratio test without residual": (
        verification,
        "verify",
        _ratio_without_residual,
        "random",
        "t0.5",
    ),
    "noise index off by one": (row_module, "GumbelRow", _same_noise_twice, "noisy", "t1"),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_broken_rule_fails_the_same_test(lab: Any, bug: Any, monkeypatch: Any) -> None:
    module, name, broken, drafter, case = BUGS[bug]
    monkeypatch.setattr(module, name, broken)
    p_value = _p_value(lab, CASES[case], drafter=drafter)
    print(f"{bug}: p {p_value:.1e}")
    assert p_value < BROKEN
