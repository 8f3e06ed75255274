"""The lookahead follows acceptance and cost: it drafts where that pays and looks again later."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftkeep.serve.lookahead import (
    PROBE_EVERY,
    PROBE_LOOKAHEAD,
    CostTable,
    LookaheadController,
    Speculation,
    Wish,
)


class Traffic:
    """Rows whose drafts are accepted at a given rate, with costs in made-up seconds."""

    def __init__(
        self,
        *,
        width_cost: Any = 0.05,
        draft_cost: Any = 0.07,
        lookahead: Any = 6,
        mode: Any = "auto",
    ) -> None:
        self.controller = LookaheadController(Speculation(mode=mode, lookahead=lookahead))
        for batch in (1, 8):
            for width in (1, 3, 1 + lookahead):
                cost = 1.0 + 0.05 * (batch - 1) + width_cost * (width - 1)
                self.controller.target_cost.observe(batch, width, cost)
            self.controller.draft_cost.observe(batch, 1, draft_cost)

    def steps(self, count: Any, rates: Any, *, cap: Any = 100) -> Any:
        """Plan `count` steps with one row for each (group, rate); the drafts of every step."""
        plans = []
        for _ in range(count):
            wishes = [Wish(group=group, cap=cap) for group in rates]
            drafts = self.controller.plan(wishes, running=len(wishes), drafter=True)
            for (group, rate), number in zip(rates.items(), drafts, strict=True):
                tested, accepted = _walked(number, rate)
                self.controller.observe(group, tested, accepted)
            plans.append(drafts)
        return plans


def _walked(number: Any, rate: Any) -> Any:
    """Expected tests and acceptances of one step."""
    reached = [rate**depth for depth in range(number)]
    return sum(reached), sum(reached) * rate


def test_good_drafts_are_used_and_better_ones_further_ahead() -> None:
    used = {}
    for rate in (0.6, 0.95):
        traffic = Traffic()
        used[rate] = traffic.steps(100, {"sql": rate})[-1][0]
        state = traffic.controller.state()
        assert state.reason == "drafting pays"
        assert state.est_speedup > 1
        assert state.acceptance == pytest.approx(rate, abs=0.05)
    assert 0 < used[0.6] < used[0.95] == 6


@pytest.mark.parametrize(
    ("rate", "costs"), [(0.02, {}), (0.5, {"draft_cost": 0.9}), (0.6, {"width_cost": 1.0})]
)
def test_drafts_that_do_not_pay_are_switched_off(rate: Any, costs: Any) -> None:
    traffic = Traffic(**costs)
    plans = traffic.steps(400, {"sql": rate})
    tail = [plan[0] for plan in plans[100:]]
    assert tail.count(0) >= len(tail) * (1 - 1 / PROBE_EVERY) - 1
    assert set(tail) == {0, PROBE_LOOKAHEAD}
    traffic.steps(1, {"sql": rate})
    state = traffic.controller.state()
    assert state.est_speedup == 1.0
    assert "does not pay" in state.reason


def test_probes_notice_a_drafter_that_becomes_good() -> None:
    traffic = Traffic()
    traffic.steps(200, {"sql": 0.01})
    traffic.controller.new_drafter()
    traffic.controller.draft_cost.observe(8, 1, 0.07)
    plans = traffic.steps(8, {"sql": 0.9})
    assert plans[0] == [PROBE_LOOKAHEAD]
    assert plans[-1][0] > 1


def test_probes_notice_traffic_that_becomes_easy() -> None:
    traffic = Traffic()
    traffic.steps(300, {"sql": 0.01})
    plans = traffic.steps(60 * PROBE_EVERY, {"sql": 0.9})
    assert plans[-1][0] > 1


def test_a_group_that_gains_nothing_gets_nothing_while_another_drafts() -> None:
    traffic = Traffic()
    plans = traffic.steps(200, {"sql": 0.9, "poetry": 0.0})[50:]
    assert all(plan[0] > 1 for plan in plans)
    assert sum(plan[1] > 0 for plan in plans) <= len(plans) / PROBE_EVERY + 1


def test_caps_hold_in_every_mode() -> None:
    for mode in ("auto", "fixed", "off"):
        for plan in Traffic(mode=mode).steps(50, {"sql": 0.9}, cap=1):
            assert plan[0] <= 1
        assert Traffic(mode=mode).steps(5, {"sql": 0.9}, cap=0)[-1] == [0]


def test_fixed_and_off_say_so() -> None:
    fixed = Traffic(mode="fixed", lookahead=3)
    assert fixed.steps(2, {"a": 0.0}) == [[3], [3]]
    assert "fixed" in fixed.controller.state().reason
    off = Traffic(mode="off")
    assert off.steps(2, {"a": 1.0}) == [[0], [0]]
    assert "configuration" in off.controller.state().reason
    assert math.isnan(off.controller.state().acceptance)
    controller = LookaheadController(Speculation(mode="auto"))
    assert controller.plan([Wish(group="a", cap=4)], running=1, drafter=False) == [0]
    assert controller.state().reason == "no drafter"


def test_many_labels_do_not_grow_the_state() -> None:
    traffic = Traffic()
    for index in range(500):
        traffic.steps(1, {f"group {index}": 0.5})
    assert len(traffic.controller._rates) <= 64


def test_a_lookahead_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Speculation(lookahead=0)


def test_costs_are_interpolated_between_measurements() -> None:
    table = CostTable()
    with pytest.raises(ValueError, match="measured"):
        table.estimate(1, 1)
    table.observe(1, 1, 1.0)
    table.observe(1, 5, 3.0)
    table.observe(8, 1, 2.0)
    table.observe(8, 5, 6.0)
    assert table.estimate(1, 3) == pytest.approx(2.0)
    assert table.estimate(8, 3) == pytest.approx(4.0)
    assert table.estimate(1, 9) == pytest.approx(3.0)
    assert table.estimate(64, 5) == pytest.approx(6.0)
    low, high = table.estimate(4, 3), table.estimate(5, 3)
    assert 2.0 < low < high < 4.0


@given(st.lists(st.floats(0.5, 2.0), min_size=1, max_size=30), st.floats(1e3, 1e6))
def test_one_stall_moves_a_cost_by_little(seen: Any, stall: Any) -> None:
    table = CostTable()
    for seconds in seen:
        table.observe(1, 1, seconds)
    before = table.estimate(1, 1)
    table.observe(1, 1, stall)
    assert before <= table.estimate(1, 1) <= 1.3 * before + 1e-9
