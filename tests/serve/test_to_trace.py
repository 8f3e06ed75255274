"""A trace says what its verification rule leaves known: the seed, or the processed log p."""

from typing import Any

import numpy as np
import pytest

from draftkeep.distill.replay import replayable
from draftkeep.ingest.codec import decode_body, encode_body
from draftkeep.ingest.tables import RemapTable, only_identity
from draftkeep.kernels.processors import log_softmax64, process
from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine.ngram import NgramDrafter
from draftkeep.serve.engine.request import Finished
from draftkeep.serve.to_trace import to_trace

PROMPT = (5, 6, 7, 5, 6)
SAMPLED = Sampling(temperature=0.8, top_p=0.9, frequency_penalty=0.3)
GREEDY = Sampling(temperature=0.0)
# Half a step of the body's grid of log-probabilities.
GRID = 0.5 / 2048


def _traces(lab: Any, rule: str, drafter: str) -> Any:
    finished: list[Finished] = []
    options: dict[str, Any] = {"verification": rule, "capture_k": 4, "on_finish": finished.append}
    if drafter == "n-gram":
        engine = lab.engine(floor=NgramDrafter(2, 1), **options)
    else:
        engine = lab.engine(drafter=drafter, **options)
    for index, sampling in enumerate((SAMPLED, GREEDY)):
        lab.run(engine, [lab.request(str(index), PROMPT, sampling=sampling, seed=77)])
    assert engine.stats().tested > 0
    traces = [to_trace(f, context_tokens=99, chat_template_hash=b"h" * 32) for f in finished]
    return [decode_body(encode_body(t, RemapTable.identity()), only_identity) for t in traces]


@pytest.mark.parametrize("drafter", ["noisy", "n-gram"])
def test_the_rejection_rule_leaves_processed_log_probabilities(lab: Any, drafter: str) -> None:
    sampled, greedy = _traces(lab, "rejection", drafter)
    assert sampled.seed is greedy.seed is None
    output = sampled.output_ids_T.tolist()
    rows = lab.logits([*PROMPT, *output])[len(PROMPT) - 1 :]
    for at, token in enumerate(output):
        scores = process(rows[at], SAMPLED, prompt_ids=PROMPT, output_ids=output[:at])
        expected = log_softmax64(scores)[token]
        assert sampled.processed_logprob_T[at] == pytest.approx(expected, abs=GRID + 1e-4)
    assert np.array_equal(greedy.processed_logprob_T, np.zeros(greedy.positions))


@pytest.mark.parametrize("drafter", ["noisy", "n-gram"])
def test_the_coupled_rule_leaves_the_seed(lab: Any, drafter: str) -> None:
    for trace in _traces(lab, "coupled", drafter):
        assert trace.seed == 77
        assert trace.processed_logprob_T is None


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_traces_of_both_rules_can_be_replayed(lab: Any, rule: str) -> None:
    assert all(replayable(trace) for trace in _traces(lab, rule, "noisy"))
