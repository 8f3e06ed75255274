"""Pairs of vocabularies: padding may differ, tokens may not."""

from typing import Any

import pytest
import torch

from draftkeep.errors import ModelError
from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine.draft_vocabulary import draftable
from draftkeep.serve.engine.drafting import DraftModel

TOKENS, TARGET = 44, 48
# Keeps an untrained target to its tokens, as training would.
TOKENS_ONLY = tuple((token, -100.0) for token in range(TOKENS, TARGET))


def _pair(lab: Any, size: int, ids: Any = None, tokens: Any = TOKENS) -> Any:
    """A drafter of the target's weights whose two vocabulary matrices have `size` rows.

    Rows beyond the target's score far above every token.
    """
    drafter = lab.drafter("copy")
    model = drafter.model
    for name in ("embed_tokens", "lm_head"):
        old = getattr(model.model if name == "embed_tokens" else model, name).weight.detach()
        new = torch.full((size, old.shape[1]), 50.0)
        new[: len(old)] = old[:size]
        if name == "embed_tokens":
            model.model.embed_tokens = torch.nn.Embedding(size, old.shape[1], _weight=new)
        else:
            model.lm_head = torch.nn.Linear(old.shape[1], size, bias=False)
            model.lm_head.weight = torch.nn.Parameter(new)
    model.config.vocab_size = size
    ids = torch.arange(size) if ids is None else ids
    return DraftModel(model=model, vocab_ids=ids, digest=b"p" * 32, tokens=tokens)


@pytest.mark.parametrize("verification", ["coupled", "rejection"])
@pytest.mark.parametrize("size", [TOKENS, TARGET, TARGET + 16])
def test_a_pair_that_differs_in_padding_alone_is_served(
    lab: Any, size: int, verification: Any
) -> None:
    engine = lab.engine(drafter=_pair(lab, size), verification=verification)
    for temperature in (0.0, 0.8):
        sampling = Sampling(temperature=temperature, logit_bias=TOKENS_ONLY)
        replies = [
            lab.request(f"{temperature}-{i}", prompt, sampling=sampling, seed=i)
            for i, prompt in enumerate(lab.prompts((3, 9, 20), vocab=TOKENS))
        ]
        before = engine.stats()
        lab.run(engine, replies)
        after = engine.stats()
        # The same weights over the same tokens: every draft is the target's own.
        assert after.accepted - before.accepted == after.tested - before.tested > 0


def test_the_head_alone_may_be_padded(lab: Any) -> None:
    drafter = _pair(lab, TARGET + 16, ids=torch.arange(TARGET), tokens=None)
    assert draftable(drafter, TARGET).tolist() == list(range(TARGET))
    engine = lab.engine(drafter=drafter)
    lab.run(engine, [lab.request("a", [1, 2, 3])])
    assert engine.stats().accepted == engine.stats().tested > 0


def test_an_id_the_drafter_cannot_read_ends_drafting_for_its_row_alone(lab: Any) -> None:
    engine = lab.engine(drafter=_pair(lab, TOKENS))
    padded = lab.request("a", [1, 2, TARGET - 1])
    tokens_only = Sampling(temperature=0.0, logit_bias=TOKENS_ONLY)
    sound = lab.request("b", [1, 2, 3], sampling=tokens_only)
    padding_only = Sampling(temperature=0.0, logit_bias=((TARGET - 1, 100.0),))
    later = lab.request("c", [4, 5], sampling=padding_only)
    expected = lab.run(lab.engine(), [lab.request("a", [1, 2, TARGET - 1])])[0]
    lab.run(engine, [padded, sound, later])
    assert padded.tokens == expected
    assert set(padded.calls) == {1}
    assert max(sound.calls) > 1
    assert set(later.tokens) == {TARGET - 1}
    assert engine.stats().drafter_failed == 0


@pytest.mark.parametrize(
    ("size", "ids", "tokens", "reason"),
    [
        (TARGET + 16, None, TARGET + 1, f"id {TARGET} is the first the target lacks"),
        (TOKENS - 1, None, TOKENS, f"id {TOKENS - 1} is the first it lacks"),
        (TOKENS, None, None, f"id {TOKENS} is the first it lacks"),
        (TARGET + 16, None, None, f"writes id {TARGET + 15} but the target's ids end below"),
        (TARGET, torch.arange(0, TARGET, 2), TOKENS, "48 outputs but its list names 24"),
        (TARGET, torch.arange(TARGET).flip(0), TOKENS, "ascending"),
        (TARGET, torch.arange(TARGET) - 1, TOKENS, "ascending"),
        (TARGET, torch.tensor([], dtype=torch.int64), TOKENS, "expected one id for each output"),
        (TARGET, torch.arange(TARGET), 0, "none of the drafter's 48 ids"),
    ],
)
def test_a_pair_that_differs_in_tokens_is_refused(
    lab: Any, size: int, ids: Any, tokens: Any, reason: str
) -> None:
    with pytest.raises(ModelError, match=reason):
        lab.engine(drafter=_pair(lab, size, ids, tokens))


def test_a_damaged_tensor_is_named(lab: Any) -> None:
    drafter = lab.drafter("copy")
    with torch.no_grad():
        drafter.model.model.norm.weight[0] = torch.nan
    with pytest.raises(ModelError, match=r"model\.norm\.weight"):
        lab.engine(drafter=drafter)
