"""The workload is what the demo says it is."""

from collections import Counter

from draftkeep.cli.demo.setup import profile_for
from draftkeep.cli.demo.stages import ROUND_ONE_SEED
from draftkeep.cli.demo.workload import DOMAINS, generate


def test_the_same_seed_gives_the_same_requests() -> None:
    assert generate(requests=50, seed=3) == generate(requests=50, seed=3)
    assert generate(requests=50, seed=3) != generate(requests=50, seed=4)


def test_enough_people_ask_even_when_a_round_is_cut_short() -> None:
    profile = profile_for("smollm2")
    items = generate(requests=profile.round_one_requests, seed=ROUND_ONE_SEED)
    items = items[: profile.round_one_least]
    people = {d.name: {i.subject for i in items if i.domain == d.name} for d in DOMAINS}
    assert len(people["sql"]) == 120
    assert len(people["arithmetic"]) == 40
    assert len(people["code"]) == 40


def test_most_requests_are_sql_at_temperature_zero_and_one_domain_is_sampled() -> None:
    items = generate(requests=480, seed=1)
    counts = Counter(item.domain for item in items)
    assert counts["sql"] / len(items) > 0.6
    temperatures = {item.domain: item.temperature for item in items}
    assert temperatures == {"sql": 0.0, "arithmetic": 0.7, "code": 0.0}
