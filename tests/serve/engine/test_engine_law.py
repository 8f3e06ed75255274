"""Sampled output follows the target's exact joint law, and broken rules are caught by the test.

The law of up to three tokens over five ids is enumerated from the plain model and the plain
processors, which share nothing with the engine. A chi-square test compares it with many seeds
through the real engine. Seeds are fixed, so the result is too: a right rule must give p > 1e-3 and
a broken one p < 1e-6.
"""

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from draftkeep.kernels import rejection
from draftkeep.kernels.coupled import verify_coupled
from draftkeep.kernels.draw import choose
from draftkeep.kernels.noise import GumbelRow, uniform
from draftkeep.kernels.outcome import Verified
from draftkeep.kernels.processors import process
from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine import model_drafter, verification
from draftkeep.serve.engine import row as row_module
from draftkeep.serve.engine.ngram import NgramDrafter
from tests.faults.plain import scores

VOCAB, TOKENS, SAMPLES = 5, 3, 2000
PROMPT = (2, 0, 3)
RIGHT, BROKEN = 1e-3, 1e-6
CASES = {
    "t0.5": Sampling(temperature=0.5),
    "t1": Sampling(temperature=1.0),
    "t1.5": Sampling(temperature=1.5),
    "top-p": Sampling(temperature=1.0, top_p=0.7),
}
ENDING = Sampling(min_tokens=1, eos_ids=(1,), stop_ids=(4,))
WIDE = {
    "repetition": Sampling(repetition_penalty=1.6),
    "presence and frequency": Sampling(presence_penalty=0.9, frequency_penalty=0.6),
    "bias": Sampling(logit_bias=((0, 1.2), (3, -1.5))),
    "min-p and top-k": Sampling(temperature=1.3, min_p=0.08, top_k=3),
    "min-tokens": ENDING,
}


def _distribution(logits: Any, sampling: Any, output: Any) -> Any:
    log_weights = scores(logits, sampling, PROMPT, output)
    weights = np.exp(log_weights - log_weights.max())
    return weights / weights.sum()


def _law(lab: Any, sampling: Any) -> Any:
    """Probability of every output: `TOKENS` ids, or fewer where one of them ends it."""
    ends = {*sampling.eos_ids, *sampling.stop_ids}
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        prefixes = [prefix for prefix in law if not ends & set(prefix[-1:])]
        with torch.inference_mode():
            ids = torch.tensor([PROMPT + prefix for prefix in prefixes])
            rows = lab.target(VOCAB)(input_ids=ids, use_cache=False).logits[:, -1].numpy()
        for prefix, logits in zip(prefixes, rows, strict=True):
            share = law.pop(prefix)
            for token, p in enumerate(_distribution(logits, sampling, prefix)):
                law[(*prefix, token)] = share * p
    assert sum(law.values()) == pytest.approx(1.0)
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


@pytest.mark.parametrize(("rule", "drafter"), [("coupled", "noisy"), ("rejection", "random")])
@pytest.mark.parametrize("case", WIDE)
def test_every_processor_belongs_to_the_law(lab: Any, case: Any, rule: Any, drafter: Any) -> None:
    p_value = _p_value(lab, WIDE[case], drafter=drafter, verification=rule)
    print(f"{case}, {rule}: p {p_value:.3f}")
    assert p_value > RIGHT


def test_an_unrelated_drafter_changes_nothing(lab: Any) -> None:
    assert _p_value(lab, CASES["t1"], drafter="random") > RIGHT


def _drafts_are_emitted(logits_WV: Any, drafts: Any, sampling: Any, **kwargs: Any) -> Any:
    """q in place of p: every draft is taken as it is."""
    fair = verify_coupled(logits_WV[-1:], [], sampling, **(kwargs | _later(kwargs, drafts)))
    return Verified(tokens=(*drafts, *fair.tokens), accepted=len(drafts), tested=len(drafts))


def _later(kwargs: Any, drafts: Any) -> Any:
    return {"output_ids": [*kwargs["output_ids"], *drafts]}


def _hot(logits_WV: Any, drafts: Any, sampling: Any, **kwargs: Any) -> Any:
    """The temperature is forgotten by the target."""
    return verify_coupled(logits_WV, drafts, Sampling(), **kwargs)


def _ratio_without_residual(
    logits_WV: Any, drafts: Any, sampling: Any, *, prompt_ids: Any, output_ids: Any, noise: Any
) -> Any:
    """Accepts with probability p(draft) and otherwise draws from p again, not from the rest."""
    tokens = []
    for row, logits_V in enumerate(logits_WV):
        scores_V = process(logits_V, sampling, prompt_ids=prompt_ids, output_ids=output_ids)
        noise_V = noise(len(output_ids) + row).at(np.arange(len(scores_V)))
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
    "drafts emitted": (verification, "verify_coupled", _drafts_are_emitted, "random", "t0.5"),
    "temperature forgotten": (verification, "verify_coupled", _hot, "noisy", "t0.5"),
    "ratio test without residual": (
        verification,
        "verify_coupled",
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


def _no_residual(p_V: Any, draft: Any, q_V: Any) -> Any:
    """What is not kept is drawn from p again."""
    return p_V


def _sharper(law_V: Any, noise_V: Any) -> Any:
    """Drawn at half the temperature of the law that is recorded."""
    return choose(2.0 * law_V, noise_V)


def _one_number(seed: Any, choice: Any, index: Any, stream: Any) -> Any:
    """One u for all positions of a request."""
    return uniform(seed, choice, 0, stream)


def _without_history(logits_V: Any, sampling: Any, *, prompt_ids: Any, output_ids: Any) -> Any:
    """Penalties see the prompt and nothing that was written."""
    return process(logits_V, sampling, prompt_ids=prompt_ids, output_ids=())


REJECTION_BUGS = {
    "no residual": (rejection, "_residual", _no_residual, "random", "t1"),
    "another law recorded": (model_drafter, "choose", _sharper, "random", "t1"),
    "one u for all positions": (verification, "uniform", _one_number, "noisy", "t0.5"),
    "history forgotten": (
        rejection,
        "process",
        _without_history,
        "random",
        "presence and frequency",
    ),
}


@pytest.mark.parametrize("bug", REJECTION_BUGS)
def test_a_broken_rejection_rule_fails_the_same_test(lab: Any, bug: Any, monkeypatch: Any) -> None:
    module, name, broken, drafter, case = REJECTION_BUGS[bug]
    monkeypatch.setattr(module, name, broken)
    p_value = _p_value(lab, (CASES | WIDE)[case], drafter=drafter, verification="rejection")
    print(f"{bug}: p {p_value:.1e}")
    assert p_value < BROKEN
