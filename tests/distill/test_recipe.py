"""The schedule and the order of a run."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftkeep.distill.recipe import Recipe
from draftkeep.errors import ConfigError


def _recipe(*, seconds: float | None = None, steps: int | None = None, seed: int = 1) -> Recipe:
    return Recipe(learning_rate=1.0, batch_traces=4, seed=seed, seconds=seconds, steps=steps)


def test_a_recipe_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="seconds or steps"):
        _recipe()


def test_the_rate_warms_up_and_falls_to_two_percent() -> None:
    recipe = _recipe(steps=100)
    assert recipe.rate(0, 0.0) == pytest.approx(0.1)
    assert recipe.rate(50, 0.0) == pytest.approx(0.51)
    assert recipe.rate(100, 0.0) == pytest.approx(0.02)
    rates = [recipe.rate(step, 0.0) for step in range(10, 101)]
    assert rates == sorted(rates, reverse=True)


def test_the_budget_that_is_used_up_first_ends_the_run() -> None:
    both = _recipe(seconds=10.0, steps=100)
    assert both.fraction(50, 1.0) == pytest.approx(0.5)
    assert both.fraction(10, 8.0) == pytest.approx(0.8)
    assert both.fraction(10, 30.0) == 1.0
    assert _recipe(seconds=10.0).fraction(10**6, 5.0) == pytest.approx(0.5)


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=90),
    seed=st.integers(0, 9),
    epoch=st.integers(0, 9),
)
def test_a_pass_visits_every_trace_once_and_is_repeatable(
    lengths: list[int], seed: int, epoch: int
) -> None:
    plan = _recipe(steps=1, seed=seed).plan(epoch, lengths)
    assert sorted(index for batch in plan for index in batch) == list(range(len(lengths)))
    assert all(1 <= len(batch) <= 4 for batch in plan)
    assert plan == _recipe(steps=1, seed=seed).plan(epoch, lengths)


def test_traces_of_like_length_share_a_batch_and_passes_differ() -> None:
    recipe, lengths = _recipe(steps=1), [1, 100] * 16
    plan = recipe.plan(0, lengths)
    assert all(len({lengths[index] for index in batch}) == 1 for batch in plan)
    assert plan != recipe.plan(1, lengths)
