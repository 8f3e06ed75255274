import math
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftkeep.policies.gate import HIDDEN_DOMAIN, POOLED_DOMAINS, GateResult, PairedScore, decide

MARGIN = 0.05


def scores(
    differences: Iterable[float], domain: str | None = "sql", incumbent: float = 0.4
) -> list[PairedScore]:
    return [
        PairedScore(
            request=f"{domain} {i}".encode(),
            domain=domain,
            candidate=incumbent + difference,
            incumbent=incumbent,
        )
        for i, difference in enumerate(differences)
    ]


def judge(paired: list[PairedScore], *, margin: float = MARGIN, least: int = 8) -> GateResult:
    return decide(paired, margin=margin, min_requests=least)


BETTER = [0.2, 0.3, 0.25, 0.1, 0.3, 0.15, 0.2, 0.0]


def test_a_better_candidate_passes() -> None:
    result = judge(scores(BETTER))
    assert result.admitted
    assert result.reasons == ()
    assert result.overall is not None
    assert result.overall.count == 8
    assert 0 < result.overall.low < result.overall.mean == pytest.approx(0.1875)


def test_no_data_and_too_few_requests_are_refused() -> None:
    nothing = judge([])
    assert (nothing.admitted, nothing.overall) == (False, None)
    assert nothing.reasons == ("too_few_requests",)
    assert judge(scores(BETTER[:7])).reasons == ("too_few_requests",)
    assert not judge(scores([0.5]), least=0).admitted


def test_choices_of_one_request_count_once() -> None:
    choices = [score for score in scores(BETTER[:4]) for _ in range(5)]
    result = judge(choices)
    assert result.overall is not None
    assert result.overall.count == 4
    assert "too_few_requests" in result.reasons


@pytest.mark.parametrize("bad", [math.nan, math.inf, -0.1, 1.1])
def test_figures_that_are_none_are_refused(bad: float) -> None:
    good = scores(BETTER)
    for odd in (
        PairedScore(request=b"x", domain=None, candidate=bad, incumbent=0.1),
        PairedScore(request=b"x", domain=None, candidate=0.9, incumbent=bad),
    ):
        assert judge([*good, odd]).reasons == ("bad_figure",)
    assert judge(good, margin=math.nan).reasons == ("bad_figure",)


def test_no_change_noise_and_one_lucky_request_do_not_pass() -> None:
    for differences in ([0.0] * 50, [0.1, -0.1] * 20, [0.5] + [0.0] * 30):
        assert judge(scores(differences)).reasons == ("not_better",)


def test_a_domain_that_loses_stops_it_and_one_within_the_margin_does_not() -> None:
    gain = scores([0.3 + 0.01 * (i % 3) for i in range(60)])
    worse = judge(gain + scores([-0.1, -0.12, -0.08, -0.1], "code"))
    assert worse.reasons == ("loses_in:code",)
    assert worse.domains["code"].mean == pytest.approx(-0.1)
    assert judge(gain + scores([-0.01, 0.0, -0.02, 0.0, -0.01, 0.0], "code")).admitted
    unsure = judge(gain + scores([0.3, -0.4, 0.2, -0.1], "code"))
    assert unsure.reasons == ("loses_in:code",)


def test_hidden_domains_are_one_domain() -> None:
    result = judge(scores([0.3] * 20) + scores([-0.2] * 6, None))
    assert result.reasons == (f"loses_in:{HIDDEN_DOMAIN}",)


def test_rare_domains_are_pooled_and_a_visible_loss_still_counts() -> None:
    gain = scores([0.3 + 0.01 * (i % 3) for i in range(60)])
    pooled = judge(gain + scores([-0.2, -0.21], "a") + scores([-0.2, -0.19], "b"))
    assert pooled.reasons == (f"loses_in:{POOLED_DOMAINS}",)
    assert pooled.domains[POOLED_DOMAINS].count == 4
    assert judge(gain + scores([-0.3], "a")).reasons == (f"loses_in:{POOLED_DOMAINS}",)
    assert judge(gain + scores([0.1], "a")).admitted


def test_the_speed_up_is_recorded_and_never_blocks() -> None:
    result = decide(scores(BETTER), margin=MARGIN, min_requests=8, speed_up=0.7)
    assert (result.admitted, result.speed_up) == (True, 0.7)


@settings(deadline=None)
@given(
    st.lists(st.floats(-0.4, 0.6), min_size=8, max_size=30),
    st.floats(0, 0.2),
    st.randoms(use_true_random=False),
)
def test_order_does_not_matter_and_worse_is_never_judged_better(
    differences: list[float], loss: float, rng: random.Random
) -> None:
    paired = scores(differences)
    shuffled = rng.sample(paired, len(paired))
    assert judge(shuffled) == judge(paired)
    worse = scores([max(-0.4, difference - loss) for difference in differences])
    result, lower = judge(paired).overall, judge(worse).overall
    assert result is not None
    assert lower is not None
    assert lower.mean <= result.mean + 1e-12


@pytest.mark.parametrize("count", [8, 40])
def test_an_equal_candidate_passes_about_one_time_in_twenty(count: int) -> None:
    """Differences as they come: three in four exactly zero, the others either way."""
    rng, passed, trials = random.Random(5), 0, 1500
    for _ in range(trials):
        differences = [rng.choice((0, 0, 0, 1)) * rng.uniform(-0.4, 0.4) for _ in range(count)]
        passed += "not_better" not in judge(scores(differences)).reasons
    assert passed / trials < 0.07
