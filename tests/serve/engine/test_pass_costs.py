"""The table of pass costs: averages where seen, sensible figures everywhere else."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftkeep.serve.engine.pass_costs import CostTable


def _table(points: Any) -> Any:
    table = CostTable()
    for (batch, width), seconds in points.items():
        table.observe(batch, width, seconds)
    return table


def test_costs_are_drawn_between_and_beyond_measurements() -> None:
    table = CostTable()
    assert not table
    with pytest.raises(ValueError, match="measured"):
        table.estimate(1, 1)
    table = _table({(1, 1): 1.0, (1, 5): 3.0, (8, 1): 2.0, (8, 5): 6.0})
    assert table
    assert table.estimate(1, 3) == pytest.approx(2.0)
    assert table.estimate(8, 3) == pytest.approx(4.0)
    assert table.estimate(1, 9) == pytest.approx(5.0)
    assert table.estimate(64, 5) >= 6.0
    low, high = table.estimate(4, 3), table.estimate(5, 3)
    assert 2.0 < low < high < 4.0


def test_a_batch_seen_with_one_width_takes_the_shape_of_its_neighbour() -> None:
    table = _table({(1, 1): 1.0, (1, 9): 3.0, (16, 1): 2.0, (16, 9): 10.0, (8, 1): 1.5})
    assert table.estimate(8, 9) == pytest.approx(7.5)
    table = _table({(1, 1): 1.0, (1, 9): 3.0, (2, 9): 4.5})
    assert table.estimate(2, 1) == pytest.approx(1.5)


def test_figures_out_of_use_follow_the_machine() -> None:
    table = CostTable()
    for _ in range(60):
        table.observe(1, 1, 1.0)
        table.observe(1, 9, 3.0)
    for _ in range(400):
        table.observe(1, 9, 6.0)
    assert table.estimate(1, 9) == pytest.approx(6.0, rel=0.01)
    assert 1.6 <= table.estimate(1, 1) <= 2.2


def test_age_counts_the_passes_of_a_batch() -> None:
    table = _table({(1, 1): 1.0, (1, 2): 1.0, (8, 1): 1.0})
    for _ in range(5):
        table.observe(1, 2, 1.0)
    assert table.age(1, 1) == 6
    assert table.age(1, 2) == 0
    assert table.age(8, 1) == 0
    assert table.age(1, 9) == 7
    assert table.age(3, 1) == 0


_SEEN = st.tuples(st.integers(1, 4), st.integers(1, 9), st.floats(0.0, 10.0))


@given(st.lists(_SEEN, min_size=1, max_size=40))
def test_a_wider_pass_never_looks_cheaper(seen: Any) -> None:
    table = CostTable()
    for batch, width, seconds in seen:
        table.observe(batch, width, seconds)
    for batch in range(1, 6):
        costs = [table.estimate(batch, width) for width in range(1, 12)]
        assert costs == sorted(costs)
        assert costs[0] > 0


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=30), st.floats(1e3, 1e6))
def test_one_stall_moves_a_cost_by_little(seen: Any, stall: Any) -> None:
    table = CostTable()
    for seconds in seen:
        table.observe(1, 1, seconds)
    before = table.estimate(1, 1)
    table.observe(1, 1, stall)
    assert before <= table.estimate(1, 1) <= 1.25 * before + 1e-9


@given(st.floats(0.1, 10.0))
def test_the_average_comes_to_what_is_measured(seconds: Any) -> None:
    table = _table({(1, 1): 1.0})
    for _ in range(300):
        table.observe(1, 1, seconds)
    assert table.estimate(1, 1) == pytest.approx(seconds, rel=0.05)
