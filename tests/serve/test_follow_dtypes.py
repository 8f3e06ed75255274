"""A node whose target is in half precision follows drafters that were trained in single."""

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from draftkeep.serve.follow import load_draft_model
from draftkeep.store.models.target import TargetModel, load_target

# Passes of different width round differently, in bfloat16 by up to a few hundredths of a logit.
CLEAR = 0.5


@pytest.fixture(scope="session")
def half() -> TargetModel:
    return load_target("tiny", dtype="bfloat16")


@pytest.fixture(scope="session")
def fresh_target(half: TargetModel) -> Callable[[], TargetModel]:
    """What the stations of this file serve; `publish` cuts its drafters from the float32 toy."""
    return lambda: replace(half, model=copy.deepcopy(half.model))


def _clear_tokens(answer: Any) -> list[str]:
    """The output up to the first token that had a rival."""
    tokens: list[str] = []
    for entry in answer["choices"][0]["logprobs"]["content"]:
        best, rival = (top["logprob"] for top in entry["top_logprobs"])
        if best - rival < CLEAR:
            break
        tokens.append(entry["token"])
    return tokens


def test_a_float32_drafter_drafts_for_a_bfloat16_target(
    stations: Callable[..., Any], publish: Callable[..., bytes]
) -> None:
    station = stations(serve={"follow_s": 3600})
    node = station.node
    ask = {"max_tokens": 40, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    texts = ("How many?", "Which of them is it?", "List all of it.")
    before = [_clear_tokens(station.chat(text, **ask)) for text in texts]
    digest = publish(station)
    node.registry.set_channel("everyone", "stable", digest, at_s=0.0)
    node.follower.poll()
    assert node.follower.current == digest
    after = [_clear_tokens(station.chat(text, **ask)) for text in texts]
    stats = node.engine.stats()
    assert stats.drafter == digest
    assert stats.tested > 0
    assert not stats.drafter_lost
    assert sum(map(len, before)) > 20
    assert after == before


def test_what_is_followed_lies_beside_the_target(
    stations: Callable[..., Any], publish: Callable[..., bytes]
) -> None:
    """One embedding tensor for both models where their values agree, in the target's dtype."""
    station = stations(serve={"follow_s": 3600})
    node, digest = station.node, publish(station)
    embedding = node.target.model.get_input_embeddings().weight
    directory = node.registry.path(digest)
    model: Any = load_draft_model(directory, node.target, gate_public=None).model
    assert {weight.dtype for weight in model.parameters()} == {torch.bfloat16}
    assert model.get_input_embeddings().weight.data_ptr() == embedding.data_ptr()
