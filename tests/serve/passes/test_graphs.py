"""Passes at fixed shapes give what ragged ones give, and padding changes no slot."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftkeep.config import MAX_LOOKAHEAD
from draftkeep.serve.passes.graphs import WIDTHS, FixedPasses
from draftkeep.serve.passes.rectangle import Segment
from draftkeep.serve.passes.runner import ModelRunner
from tests.serve.families import build

SLOTS, CONTEXT = 4, 100


@pytest.fixture(scope="module")
def pair() -> Any:
    """One model behind ragged passes and behind fixed ones."""
    model = build("llama")
    return [
        ModelRunner(
            copy.deepcopy(model), slots=SLOTS, context=CONTEXT, packing="never", graphs=graphs
        )
        for graphs in ("never", "fixed")
    ]


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_course_of_passes_leaves_equal_logits_and_equal_caches(pair: Any, data: Any) -> None:
    lengths = dict.fromkeys(range(SLOTS), 0)
    for runner in pair:
        runner.clear()
    for _ in range(data.draw(st.integers(1, 5))):
        segments = []
        for slot in data.draw(st.sets(st.integers(0, SLOTS - 1), min_size=1)):
            start = data.draw(st.integers(0, lengths[slot]))
            fed = data.draw(st.lists(st.integers(0, 47), min_size=1, max_size=20))
            lengths[slot] = start + len(fed)
            want = data.draw(st.integers(0, len(fed)))
            segments.append(Segment(slot=slot, tokens=fed, start=start, want=want))
        ragged, fixed = (runner.forward(segments) for runner in pair)
        torch.testing.assert_close(fixed, ragged, rtol=1e-5, atol=1e-4)
    for ragged_layer, fixed_layer in zip(*(r._cache.slot_layers for r in pair), strict=True):
        # Apart from the spare position, which nobody reads, and what no pass has written.
        torch.testing.assert_close(
            fixed_layer.keys[:, :, :CONTEXT],
            ragged_layer.keys[:, :, :CONTEXT],
            rtol=1e-5,
            atol=1e-4,
        )


def test_what_was_given_out_is_not_written_again(pair: Any) -> None:
    fixed = pair[1]
    first = fixed.forward([Segment(slot=0, tokens=[1, 2], start=0, want=2)])
    kept = first.clone()
    fixed.forward([Segment(slot=0, tokens=[9, 9], start=0, want=2)])
    fixed.idle_pass(SLOTS, 2)
    assert torch.equal(first, kept)


def test_few_shapes_occur_and_their_addresses_stay() -> None:
    seen: list[tuple[tuple[int, ...], int, int]] = []

    def compute(inputs_3BW: Any, view: Any) -> Any:
        seen.append((tuple(inputs_3BW.shape), view, inputs_3BW.data_ptr()))
        return inputs_3BW[0]

    passes = FixedPasses(compute, slots=3, context=1000, device=torch.device("cpu"), widths=(1, 4))
    for count, start in [(1, 0), (2, 60), (4, 70), (3, 130), (4, 990), (1, 5)]:
        segment = Segment(slot=1, tokens=list(range(1, count + 1)), start=start)
        got = passes.run([segment], count)
        assert got is not None
        assert got[1, :count].tolist() == segment.tokens
        assert int(got.sum()) == sum(segment.tokens)
    assert [(shape, view) for shape, view, _ in seen] == [
        ((3, 3, 1), 64),
        ((3, 3, 4), 64),
        ((3, 3, 4), 128),
        ((3, 3, 4), 256),
        ((3, 3, 4), 1000),
        ((3, 3, 1), 64),
    ]
    assert seen[0][2] == seen[5][2]
    assert passes.run([Segment(slot=0, tokens=[1] * 5, start=0)], 5) is None


def test_every_lookahead_that_can_be_configured_has_a_fixed_shape() -> None:
    assert max(WIDTHS) == 1 + MAX_LOOKAHEAD


def test_a_shape_that_cannot_be_prepared_is_reported_and_passes_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def failing(self: Any, width: Any, view: Any) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(FixedPasses, "_prepare", failing)
    problems: list[tuple[str, BaseException]] = []
    model = build("llama")
    runner, plain = (
        ModelRunner(
            copy.deepcopy(model),
            slots=2,
            context=CONTEXT,
            packing="never",
            graphs=graphs,
            on_problem=lambda kind, error: problems.append((kind, error)),
        )
        for graphs in ("fixed", "never")
    )
    segment = Segment(slot=1, tokens=[3, 4, 5], start=0, want=3)
    for _ in range(2):
        torch.testing.assert_close(runner.forward([segment]), plain.forward([segment]))
    assert [(kind, str(error)[:22]) for kind, error in problems] == [
        ("a CUDA graph", "operation not permitte")
    ]
