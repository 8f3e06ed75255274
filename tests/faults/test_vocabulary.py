"""Class D: which drafter's vocabulary fits a target's."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from draftkeep.errors import ModelError
from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine.drafting import DraftModel
from tests.faults.plain import engine_over, plain_output

VOCAB = 48
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=1.0),
    Sampling(temperature=1.1, presence_penalty=0.4, min_p=0.01),
)


def _padded(lab: Any, rows: int) -> Any:
    """The target with `rows` more rows of input and output, the outputs loud enough to win."""
    model = copy.deepcopy(lab.target())
    width = model.config.hidden_size
    torch.manual_seed(1)
    inputs, outputs = nn.Embedding(VOCAB + rows, width), nn.Linear(width, VOCAB + rows, bias=False)
    with torch.no_grad():
        inputs.weight[:VOCAB] = model.model.embed_tokens.weight
        outputs.weight.mul_(50)
        outputs.weight[:VOCAB] = model.lm_head.weight
    model.set_input_embeddings(inputs)
    model.set_output_embeddings(outputs)
    model.config.vocab_size = VOCAB + rows
    return model


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("padding", [16, 128, 1000])
@pytest.mark.parametrize("head", ["trimmed", "padded"])
def test_a_drafter_padded_further_than_its_target_drafts_as_if_it_were_not(
    lab: Any, padding: int, rule: str, head: str
) -> None:
    """vllm#5203, #7252, #10913, QwenLM/Qwen3#326: one tokenizer, but 151,936 and 152,064 rows: an
    assertion, a divergence, or a limit on the difference of sizes.

    Any padding is accepted, padding ids are never proposed, and acceptance is that of the drafter
    without padding.
    """
    model = _padded(lab, padding)
    ids = torch.arange(VOCAB + padding)
    if head == "trimmed":
        model.lm_head.weight = nn.Parameter(model.lm_head.weight[:VOCAB].clone())
        ids = ids[:VOCAB]
    drafter = DraftModel(model=model, vocab_ids=ids, digest=b"p" * 32, tokens=VOCAB)
    engine = lab.engine(drafter=drafter, lookahead=4, verification=rule)
    replies = [
        lab.request(str(i), p, sampling=SAMPLINGS[i], seed=i)
        for i, p in enumerate(lab.prompts((3, 6, 9)))
    ]
    lab.run(engine, replies)
    assert engine.stats().tested > 20
    assert engine.stats().accepted == engine.stats().tested
    if rule == "coupled":
        for index, reply in enumerate(replies):
            prompt = reply.request.prompt_ids
            expected = plain_output(lab, prompt, SAMPLINGS[index], tokens=16, seed=index)
            lab.assert_same(reply, expected)


@pytest.mark.parametrize("fault", ["more tokens", "smaller inputs"])
def test_a_drafter_of_another_vocabulary_is_refused_with_the_first_id_that_differs(
    lab: Any, fault: str
) -> None:
    """vllm#14939, lcpp#3812, LostRuins/koboldcpp#2325: a pair that does not fit ran without any
    acceptance, or was refused without saying why."""
    engine = lab.engine(drafter="copy")
    if fault == "more tokens":
        model, tokens, first = _padded(lab, 16), VOCAB + 16, "id 48 "
    else:
        model, tokens, first = copy.deepcopy(lab.target(40)), VOCAB, "id 40 "
    drafter = DraftModel(
        model=model,
        vocab_ids=torch.arange(model.config.vocab_size),
        digest=b"u" * 32,
        tokens=tokens,
    )
    with pytest.raises(ModelError, match=first):
        engine.swap(drafter)
    lab.run(engine, [lab.request("a", (1, 2))])
    assert engine.stats().drafter.startswith(b"copy")
    assert engine.stats().accepted == engine.stats().tested > 0


def test_a_padded_target_is_drafted_for_over_its_real_ids(lab: Any) -> None:
    """vllm#5203 the other way round: the target has the padding.

    Its own output may hold padding ids, as transformers' would; a drafter that knows the real ids
    alone proposes none of them, and every text stays the target's.
    """
    target = _padded(lab, 16)
    with torch.no_grad():
        target.lm_head.weight[VOCAB:] *= 0.01
    drafter = copy.deepcopy(target)
    drafter.lm_head.weight = nn.Parameter(drafter.lm_head.weight[:VOCAB].clone())
    outputs = []
    known = DraftModel(model=drafter, vocab_ids=torch.arange(VOCAB), digest=b"d" * 32, tokens=VOCAB)
    for loaded in (None, known):
        engine = engine_over(target, drafter=loaded)
        replies = [
            lab.request(str(i), p, sampling=SAMPLINGS[i], seed=i)
            for i, p in enumerate(lab.prompts((3, 6, 9)))
        ]
        outputs.append(lab.run(engine, replies))
    assert outputs[0] == outputs[1]
    assert engine.stats().accepted > 0
