"""The rounds of the long campaign: how they add up, and that finished ones are not run again."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.faults.kills import Kills, run_kills
from bench.results import commit

FOUND: dict[str, Any] = {
    "seconds": 9,
    "problems": [],
    "kills": 7,
    "weather": {"broker killed": 1},
    "freezes": 1,
    "erased": 1,
    "exits": 0,
    "acknowledged": 100,
    "stored": 90,
    "lost": 0,
    "doubled": 0,
    "in_kafka": 101,
    "places": {"forward: in append": 7},
    "frozen_places": {"compact: in advance": 1},
}


def test_the_rounds_make_up_the_kills_on_one_broker_and_on_three() -> None:
    plans = list(Kills(kills=1000, rounds=3, seed=5).plans())
    assert sum(plan.kills for _, plan in plans) >= 1000
    assert [brokers for brokers, _ in plans] == [1, 3, 1]
    assert [plan.seed for _, plan in plans] == [5, 6, 7]
    assert all(plan.outages >= 3 for _, plan in plans)


@pytest.mark.parametrize(("lost", "status"), [(0, 0), (2, 1)])
def test_finished_rounds_are_counted_and_not_run_again(
    tmp_path: Path, lost: int, status: int
) -> None:
    directory = tmp_path / f"kills-14-2-1-{commit()}"
    directory.mkdir()
    second = {"lost": lost, "problems": [f"{lost} lost"] if lost else []}
    for seed, differs in ((1, {}), (2, second)):
        found = {**FOUND, **differs, "brokers": 2 * seed - 1, "seed": seed}
        (directory / f"round-{seed}.json").write_text(json.dumps(found))
    screen = io.StringIO()
    answer = run_kills(
        Kills(kills=14, rounds=2, seed=1),
        cache_dir=tmp_path,
        results_dir=tmp_path,
        fresh=False,
        console=Console(file=screen),
    )
    assert answer == status
    assert ("2 lost" in screen.getvalue()) == bool(lost)
    rows = [json.loads(line) for line in (tmp_path / "faults.jsonl").read_text().splitlines()]
    assert {row["metric"]: row["value"] for row in rows} == {
        "kills": 14,
        "lost": lost,
        "doubled": 0,
    }
    assert rows[0]["conditions"]["places"] == {"forward: in append": 14}
    assert rows[1]["against"] == "200 acknowledged traces"
