"""The short fault campaign, and proof that a campaign finds what it looks for."""

import pprint
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.crash.campaign.plan import Plan, Weather
from tests.crash.campaign.run import Campaign, Outcome, says
from tests.crash.campaign.site import open_site
from tests.services.kafka import Kafka
from tests.services.postgres import Postgres

Conduct = Callable[[Plan], Outcome]


@pytest.fixture
def conduct(
    tmp_path: Path, kafka_broker: Kafka, kafka_topic: str, postgres: Postgres, postgres_url: str
) -> Conduct:
    """Run a plan on services of the tests, and print what it did and found."""

    def conduct(plan: Plan) -> Outcome:
        site = open_site(
            tmp_path / "site",
            plan,
            kafka=kafka_broker,
            topic=kafka_topic,
            postgres=postgres,
            catalog_url=postgres_url,
        )
        with site as opened:
            outcome = Campaign(opened, plan).run()
        pprint.pprint(says(outcome))
        return outcome

    return conduct


@pytest.mark.timeout(600)
def test_every_acknowledged_trace_is_stored_exactly_once(conduct: Conduct) -> None:
    outcome = conduct(Plan(kills=60, seed=2026))
    tally, count = outcome.tally, outcome.count
    assert count.problems() == []
    assert count.acknowledged > 100
    assert tally.kills >= 60
    assert tally.erased > 0
    assert set(tally.weather) == set(Weather)
    assert len(tally.places) > 10, "the kills met too few places"


@pytest.mark.parametrize(
    ("planted", "aim", "found"),
    [
        ("free_early", "forward: in KafkaWriter.begin", "lost"),
        ("offset_early", "compact: in write_shard", "lost"),
        ("forget_ids", "forward: after Sending.wait", "doubled"),
    ],
)
def test_a_planted_fault_is_found(conduct: Conduct, planted: str, aim: str, found: str) -> None:
    outcome = conduct(
        Plan(
            kills=3,
            seed=1,
            nodes=1,
            rivals=0,
            compactors=1,
            outages=0,
            planted=planted,
            aims=(aim,),
        )
    )
    assert getattr(outcome.count, found) > 0
    assert set(outcome.tally.places) == {aim}
