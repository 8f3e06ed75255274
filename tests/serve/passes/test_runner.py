"""Ragged passes give the plain model's logits, and models that cannot be served are refused."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftkeep.errors import ModelError
from draftkeep.serve.passes.rectangle import Segment
from draftkeep.serve.passes.runner import ModelRunner
from tests.serve.families import build

SLOTS = 4


@pytest.fixture(scope="module")
def runner(lab: Any) -> Any:
    return ModelRunner(copy.deepcopy(lab.target()), slots=SLOTS, context=100, packing="never")


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(data=st.data())
def test_any_course_of_feeding_and_rewinding_gives_plain_logits(
    lab: Any, runner: Any, data: Any
) -> None:
    """Rows of any length are fed in any cut, rewound, overwritten and idled among neighbours."""
    rows: dict[int, list[int]] = {slot: [] for slot in range(SLOTS)}
    tokens = st.lists(st.integers(0, 47), min_size=1, max_size=9)
    for _ in range(data.draw(st.integers(1, 5))):
        segments = []
        for slot in data.draw(st.sets(st.integers(0, SLOTS - 1), min_size=1)):
            start = data.draw(st.integers(0, len(rows[slot])))
            fed = data.draw(tokens)
            rows[slot] = rows[slot][:start] + fed
            want = data.draw(st.integers(0, len(fed)))
            segments.append(Segment(slot=slot, tokens=fed, start=start, want=want))
        logits = runner.forward(segments)
        expected = [
            torch.from_numpy(lab.logits(rows[s.slot]))[len(rows[s.slot]) - s.want :]
            for s in segments
        ]
        torch.testing.assert_close(logits, torch.cat(expected), rtol=1e-4, atol=2e-4)


def test_an_idle_pass_changes_no_slot(lab: Any, runner: Any) -> None:
    ids = [1, 5, 9]
    runner.prefill([Segment(slot=0, tokens=ids[:2], start=0)])
    for batch in (1, SLOTS):
        runner.idle_pass(batch, 3)
    logits = runner.forward([Segment(slot=0, tokens=ids[2:], start=2, want=1)])
    expected = torch.from_numpy(lab.logits(ids))[-1:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=2e-4)


def _eager(model: Any) -> None:
    model.config._attn_implementation = "eager"


def _sliding(model: Any) -> None:
    model.config.sliding_window = 8


def _mixed(model: Any) -> None:
    model.config.layer_types = ["full_attention", "linear_attention"]


def _short(model: Any) -> None:
    model.config.max_position_embeddings = 50


def _damaged(model: Any) -> None:
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.inf


def _odd(model: Any) -> None:
    """Attention whose output depends on the width of the pass: no cache can serve it."""
    model.model.layers[0].self_attn.register_forward_hook(
        lambda module, args, output: (output[0] * (1 + 0.01 * output[0].shape[1]), output[1])
    )


def _set(name: str, value: Any) -> Any:
    return lambda model: setattr(model.config, name, value)


def _rope(model: Any) -> None:
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def _stateful(model: Any) -> None:
    model._is_stateful = True


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (_eager, "sdpa"),
        (_sliding, "sliding window"),
        (_mixed, "linear_attention"),
        (_short, "max_context"),
        (_damaged, "not numbers"),
        (_odd, "differ"),
        (_rope, "dynamic rotation"),
        (_stateful, "recurrent state"),
        (_set("is_encoder_decoder", True), "encoder-decoder"),
        (_set("vision_config", object()), "more than text"),
        (_set("final_logit_softcapping", 30.0), "softcapping"),
        (_set("logit_scale", 0.5), "logit_scale"),
    ],
)
def test_a_model_that_would_be_served_wrong_is_refused(lab: Any, fault: Any, words: Any) -> None:
    model = copy.deepcopy(lab.target())
    fault(model)
    with pytest.raises(ModelError, match=words):
        ModelRunner(model, slots=2, context=100, packing="never")


def test_every_reason_is_named_at_once(lab: Any) -> None:
    model = copy.deepcopy(lab.target())
    _sliding(model)
    _short(model)
    _eager(model)
    with pytest.raises(ModelError, match=r"sliding window.*sdpa.*50 positions but 100"):
        ModelRunner(model, slots=2, context=100)


def test_learned_positions_end_where_the_table_ends() -> None:
    with pytest.raises(ModelError, match="256 positions but 257"):
        ModelRunner(build("gpt2"), slots=2, context=257)
    runner = ModelRunner(build("gpt2"), slots=2, context=256)
    logits = runner.forward([Segment(slot=1, tokens=[1, 2], start=254, want=2)])
    assert bool(torch.isfinite(logits).all())


@pytest.mark.parametrize("family", ["Mamba", "Bloom"])
def test_a_model_without_sdpa_or_positions_is_refused(family: Any) -> None:
    with pytest.raises(ModelError, match="cannot be served"):
        ModelRunner(build(family, attention="eager"), slots=2, context=100)


def test_a_pass_that_breaks_in_the_trial_is_a_refusal(lab: Any) -> None:
    model = copy.deepcopy(lab.target())
    model.model.layers[1].mlp = torch.nn.Linear(3, 3)
    with pytest.raises(ModelError, match="RuntimeError"):
        ModelRunner(model, slots=2, context=100)
