"""Both rules draw from the target's exact joint law, and broken ones are caught by the same test.

The law of three tokens over five ids is enumerated by code that shares nothing with the kernels.
A chi-square test compares it with many seeds of drafting and verification. Seeds are fixed, so the
result is too: a right rule must give p > 1e-3 and a broken one p < 1e-6.
"""

from collections import Counter
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy import stats

from draftkeep.kernels import coupled, draw, processors, rejection
from draftkeep.kernels.noise import (
    ACCEPT,
    COUPLED,
    DRAFT,
    RECOVERY,
    GumbelRow,
    gumbel,
    uniform,
)
from draftkeep.kernels.outcome import is_end
from draftkeep.kernels.processors import log_softmax64, process
from draftkeep.kernels.sampling import Sampling

VOCAB, TOKENS = 5, 3
SAMPLES, FOR_BUGS = 1000, 2500
PROMPT = (2, 0, 3)
RIGHT, BROKEN = 1e-3, 1e-6
_RNG = np.random.default_rng(4)
TARGET_VV = _RNG.standard_normal((VOCAB, VOCAB)).astype(np.float32)
DRAFTER_VV = _RNG.standard_normal((VOCAB, VOCAB)).astype(np.float32)
# The target likes id 0 more, so that recoveries name the id whose noise the test shares.
TARGET_VV[:, 0] += 1.0
DRAFTER_VV[:, 0] -= 1.0
CASES = {
    "t1": Sampling(),
    "t0.6 top-p": Sampling(temperature=0.6, top_p=0.95),
    "t1.4 top-k min-p": Sampling(temperature=1.4, top_k=4, min_p=0.05),
    "penalties and bias": Sampling(
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        logit_bias=((1, 0.8), (4, -100.0)),
    ),
    "eos": Sampling(eos_ids=(3,), min_tokens=1),
}


def _row(prefix: tuple[int, ...], sampling: Sampling) -> Any:
    """The target's distribution after an output, every stage written out plainly."""
    last = [*PROMPT, *prefix][-1]
    logits = {token: float(TARGET_VV[last, token]) for token in range(VOCAB)}
    for token, bias in sampling.logit_bias:
        logits[token] += bias
    if len(prefix) < sampling.min_tokens:
        logits |= dict.fromkeys((*sampling.eos_ids, *sampling.stop_ids), -np.inf)
    for token in {*PROMPT, *prefix}:
        penalty = sampling.repetition_penalty
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    for token in set(prefix):
        logits[token] -= sampling.presence_penalty
        logits[token] -= sampling.frequency_penalty * prefix.count(token)
    ranked = sorted(logits, key=lambda token: -logits[token])
    weight = {t: np.exp((logits[t] - logits[ranked[0]]) / sampling.temperature) for t in ranked}
    ranked = [token for token in ranked if weight[token] >= sampling.min_p]
    ranked = ranked[: sampling.top_k or None]
    total, kept = sum(weight[token] for token in ranked), 0.0
    share = dict.fromkeys(range(VOCAB), 0.0)
    for token in ranked:
        if kept < sampling.top_p * total:
            share[token] = weight[token]
            kept += weight[token]
    return {token: value / kept for token, value in share.items()}


def _law(sampling: Sampling) -> Any:
    """Probability of every output that is possible: `TOKENS` ids, or fewer up to an EOS."""
    law: dict[tuple[int, ...], float] = {(): 1.0}
    for length in range(TOKENS):
        for prefix in [key for key in law if len(key) == length]:
            if prefix and prefix[-1] in sampling.eos_ids:
                continue
            mass = law.pop(prefix)
            for token, share in _row(prefix, sampling).items():
                if share > 0:
                    law[*prefix, token] = mass * share
    assert sum(law.values()) == pytest.approx(1.0)
    return law


@dataclass(frozen=True)
class Rule:
    """How outputs are made, with a place for each mistake one could make."""

    name: str = "rejection"
    lookahead: int = 2
    certain: bool = False
    recovery_stream: int = RECOVERY
    greedy_draft: bool = False
    law_sees_drafts: bool = True

    def output(self, sampling: Sampling, seed: int) -> tuple[int, ...]:
        output: list[int] = []
        while len(output) < TOKENS and not (output and is_end(output[-1], sampling)):
            output += self._step(sampling, seed, output)
        return tuple(output[:TOKENS])

    def _step(self, sampling: Sampling, seed: int, output: list[int]) -> tuple[int, ...]:
        drafts: list[int] = []
        laws: list[Any] = []
        for _ in range(self.lookahead):
            token, law_V = self._draft(sampling, seed, output, drafts)
            drafts.append(token)
            laws.append(law_V)
        lasts = [[*PROMPT, *output][-1], *drafts]
        arguments: Any = {"prompt_ids": PROMPT, "output_ids": output}
        logits_WV = TARGET_VV[lasts]
        if self.name == "coupled":
            noise = lambda index: GumbelRow(seed, 0, index, VOCAB)  # noqa: E731
            rule = coupled.verify_coupled
            return rule(logits_WV, drafts, sampling, noise=noise, **arguments).tokens
        return rejection.verify_rejection(
            logits_WV,
            drafts,
            laws,
            sampling,
            uniform=lambda index: uniform(seed, 0, index, ACCEPT),
            noise=lambda index: gumbel(seed, 0, index, VOCAB, self.recovery_stream),
            **arguments,
        ).tokens

    def _draft(self, sampling: Sampling, seed: int, output: list[int], drafts: list[int]) -> Any:
        last = [*PROMPT, *output, *drafts][-1]
        if self.certain:
            return (last * 3 + 1) % VOCAB, None
        history = [*output, *drafts]
        scores_V = process(DRAFTER_VV[last], sampling, prompt_ids=PROMPT, output_ids=history)
        stream = COUPLED if self.name == "coupled" else DRAFT
        noise_V = None if self.greedy_draft else gumbel(seed, 0, len(history), VOCAB, stream)
        seen = history if self.law_sees_drafts else []
        law_V = log_softmax64(
            process(DRAFTER_VV[last], sampling, prompt_ids=PROMPT, output_ids=seen)
        )
        return draw.choose(scores_V, noise_V), law_V


def _p_value(rule: Rule, sampling: Sampling, samples: int) -> float:
    law = _law(sampling)
    counts = Counter(rule.output(sampling, seed) for seed in range(samples))
    if any(output not in law for output in counts):
        return 0.0
    cells = sorted(law, key=law.__getitem__)
    return _pooled([counts[cell] for cell in cells], [law[cell] * samples for cell in cells])


def _pooled(seen: Any, expected: Any, least: float = 8.0) -> float:
    """The test over cells merged until each expects `least`; cells come in rising expectation."""
    starts, total = [0], 0.0
    for index, value in enumerate(expected):
        total += value
        if total >= least:
            starts.append(index + 1)
            total = 0.0
    seen = np.add.reduceat(np.array(seen, float), starts[:-1])
    expected = np.add.reduceat(np.array(expected), starts[:-1])
    assert len(expected) > 5
    return float(stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue)


RULES = {
    "coupled": Rule(name="coupled"),
    "coupled n-gram": Rule(name="coupled", certain=True),
    "rejection": Rule(),
    "rejection n-gram": Rule(certain=True),
}


@pytest.mark.parametrize(
    ("rule", "case"),
    [
        *product(("coupled", "rejection"), CASES),
        *product(("coupled n-gram", "rejection n-gram"), ("t1", "penalties and bias")),
    ],
)
def test_tokens_follow_the_targets_joint_law(rule: str, case: str) -> None:
    p_value = _p_value(RULES[rule], CASES[case], SAMPLES)
    print(f"{rule}, {case}: p {p_value:.3f}")
    assert p_value > RIGHT


def test_the_rejection_rule_accepts_as_often_as_the_laws_overlap() -> None:
    """One minus total variation, the most that any rule can accept."""
    p_V, q_V = (log_softmax64(table[3].astype(np.float64)) for table in (TARGET_VV, DRAFTER_VV))
    drawn = 2000
    accepted = 0
    for seed in range(drawn):
        draft = draw.choose(q_V, gumbel(seed, 0, 0, VOCAB, DRAFT))
        accepted += rejection.verify_rejection(
            TARGET_VV[[3, draft]],
            [draft],
            [q_V],
            Sampling(),
            prompt_ids=PROMPT,
            output_ids=[],
            uniform=lambda index, seed=seed: uniform(seed, 0, index, ACCEPT),  # type: ignore[misc]
            noise=lambda index: np.zeros(VOCAB),
        ).accepted
    overlap = np.minimum(np.exp(p_V), np.exp(q_V)).sum()
    assert accepted / drawn == pytest.approx(overlap, abs=4 * np.sqrt(overlap / drawn))


def _recover_from_target(p_V: Any, draft: int, q_V: Any) -> Any:
    return p_V


def _keep_what_target_and_drafter_share(p_V: Any, draft: int, q_V: Any) -> Any:
    """The residual of the absolute difference: mass goes where the drafter had too much."""
    return np.log(np.abs(np.exp(p_V) - np.exp(q_V)))


def _ratio_without_q(p_V: Any, draft: int, q_V: Any) -> float:
    return float(np.exp(p_V[draft]))


BUGS: dict[str, tuple[Rule, str, dict[str, Any]]] = {
    "a greedy draft tested against a soft q": (Rule(greedy_draft=True), "t1", {}),
    "recovery from p": (Rule(), "t1", {"_residual": _recover_from_target}),
    "recovery of the wrong side": (
        Rule(),
        "t1",
        {"_residual": _keep_what_target_and_drafter_share},
    ),
    "the test forgets q": (Rule(), "t1", {"_ratio": _ratio_without_q}),
    "a certain draft is always kept": (Rule(certain=True), "t1", {"_ratio": lambda *_: 1.0}),
    "q without the penalties of the block": (
        Rule(law_sees_drafts=False),
        "penalties and bias",
        {},
    ),
    "recovery with the noise of the test": (Rule(recovery_stream=ACCEPT), "t1", {}),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_broken_rule_fails_the_same_test(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rule, case, patches = BUGS[bug]
    for name, broken in patches.items():
        monkeypatch.setattr(rejection, name, broken)
    p_value = _p_value(rule, CASES[case], FOR_BUGS if case != "t1" else SAMPLES)
    print(f"{bug}: p {p_value:.1e}")
    assert p_value < BROKEN


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_penalties_that_miss_the_block_fail_the_same_test(
    rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The target's penalties count what was emitted before, not what the step has accepted."""
    seeing = processors.penalised

    def blind(row: Any, sampling: Any, *, prompt_ids: Any, output_ids: Any) -> Any:
        return seeing(row, sampling, prompt_ids=prompt_ids, output_ids=output_ids[:1])

    for module in (draw, processors):
        monkeypatch.setattr(module, "penalised", blind)
    assert _p_value(RULES[rule], CASES["penalties and bias"], SAMPLES) < BROKEN
