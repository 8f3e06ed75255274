"""Tokens are as unlikely under the target as they should be, at every position of the output.

Where a token is drawn from p, -log p(token) averages to the entropy of p, whatever came before it.
So the mean of the difference over many outputs is 0 at every position, with and without drafts. A
rule that is wrong by a tenth of a nat anywhere is caught; plain decoding passes the same test.
"""

from typing import Any

import numpy as np
import pytest
import torch

from draftkeep.kernels import rejection
from draftkeep.kernels.processors import log_softmax64, process
from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine import verification
from draftkeep.serve.engine.ngram import NgramDrafter

VOCAB, TOKENS, OUTPUTS, FOR_BUGS = 12, 4, 3000, 1000
ALLOWED = 0.06
PROMPT = (2, 0, 3, 7, 2, 0)
SAMPLING = Sampling(temperature=0.8, top_k=4, frequency_penalty=0.4)
DRAFTERS = ("noisy", "n-gram")


def _outputs(lab: Any, drafter: str, rule: str, outputs: int = OUTPUTS) -> list[list[int]]:
    options: dict[str, Any] = {"verification": rule, "vocab": VOCAB, "slots": 64, "lookahead": 3}
    if drafter == "n-gram":
        options["floor"] = NgramDrafter(2, 1)
    else:
        options["drafter"] = drafter
    engine = lab.engine(queue=outputs, **options)
    replies = [
        lab.request(str(seed), PROMPT, max_tokens=TOKENS, sampling=SAMPLING, seed=seed)
        for seed in range(outputs)
    ]
    tokens: list[list[int]] = lab.run(engine, replies)
    assert (engine.stats().tested > outputs) == (drafter != "none")
    return tokens


def _excess_T(lab: Any, outputs: Any) -> tuple[Any, Any]:
    """Mean of -log p(token) minus the entropy of p at every position, and its standard error."""
    ids = torch.tensor([[*PROMPT, *output] for output in outputs])
    with torch.inference_mode():
        logits = lab.target(VOCAB)(input_ids=ids, use_cache=False).logits.numpy()
    excess_NT = np.zeros((len(outputs), TOKENS))
    for row, output in enumerate(outputs):
        for at, token in enumerate(output):
            scores = process(
                logits[row, len(PROMPT) + at - 1],
                SAMPLING,
                prompt_ids=PROMPT,
                output_ids=output[:at],
            )
            logs = log_softmax64(scores)
            inside = logs > -np.inf
            entropy = -(np.exp(logs[inside]) * logs[inside]).sum()
            # An impossible token is a large number, so that the mean stays one.
            excess_NT[row, at] = min(-logs[token], 1e6) - entropy
    return excess_NT.mean(axis=0), excess_NT.std(axis=0) / np.sqrt(len(outputs))


@pytest.mark.parametrize(
    ("rule", "drafter"),
    [("coupled", "none")] + [(rule, d) for rule in ("coupled", "rejection") for d in DRAFTERS],
)
def test_tokens_are_as_likely_as_they_should_be(lab: Any, rule: str, drafter: str) -> None:
    excess_T, error_T = _excess_T(lab, _outputs(lab, drafter, rule))
    print(f"{rule}, {drafter}: {np.round(excess_T, 3)} +- {error_T.max():.3f} nat")
    # Three errors below a tenth of a nat, four above none.
    assert error_T.max() < ALLOWED / 4
    assert np.abs(excess_T).max() < ALLOWED


BUGS = {
    "temperature forgotten": (
        verification,
        "verify_rejection",
        lambda logits, drafts, laws, sampling, **kwargs: rejection.verify_rejection(
            logits, drafts, laws, Sampling(top_k=4, frequency_penalty=0.4), **kwargs
        ),
    ),
    "drafts always kept": (rejection, "_ratio", lambda *_: 1.0),
}


@pytest.mark.parametrize("bug", BUGS)
def test_a_broken_rule_fails_the_same_test(
    lab: Any, bug: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, name, broken = BUGS[bug]
    monkeypatch.setattr(module, name, broken)
    excess_T, _ = _excess_T(lab, _outputs(lab, "random", "rejection", FOR_BUGS))
    print(f"{bug}: {np.round(excess_T, 3)} nat")
    assert np.abs(excess_T).max() > ALLOWED
