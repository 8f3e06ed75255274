"""The long fault campaign, in rounds: on one broker, on three, and again.

A finished round is kept, so that a run that was stopped goes on with the next one; a round that
found something keeps its files too.
"""

import json
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.results import Row, append_rows, commit
from tests.crash.campaign.plan import Plan
from tests.crash.campaign.run import Campaign, says
from tests.crash.campaign.site import open_site
from tests.services.kafka import running_kafka
from tests.services.postgres import running_postgres

_PACKAGES = ("kafka-python", "sqlalchemy", "psycopg", "pyarrow", "duckdb")
_BROKERS = (1, 3)
# Three brokers on one busy machine take their time to answer each other.
_PATIENT = {"broker.session.timeout.ms": "3000"}
_KILLS_PER_OUTAGE = 15
_TALLIES = ("weather", "places", "frozen_places")
_SUMS = ("kills", "acknowledged", "stored", "in_kafka", "lost", "doubled", "freezes", "exits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kills:
    """How many processes are killed, in how many rounds, from which seed on."""

    kills: int = 1000
    rounds: int = 4
    seed: int = 1

    def plans(self) -> Iterator[tuple[int, Plan]]:
        """Brokers and plan of each round."""
        each = -(-self.kills // self.rounds)
        for number in range(self.rounds):
            plan = Plan(
                kills=each, seed=self.seed + number, outages=max(3, each // _KILLS_PER_OUTAGE)
            )
            yield _BROKERS[number % len(_BROKERS)], plan


def run_kills(
    kills: Kills, *, cache_dir: Path, results_dir: Path, fresh: bool, console: Console
) -> int:
    """Run every round that is not there yet and append the rows; the exit status.

    1 where a round found a trace lost or doubled, or a store that is not sound.
    """
    directory = cache_dir / f"kills-{kills.kills}-{kills.rounds}-{kills.seed}-{commit()}"
    if fresh:
        shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True, exist_ok=True)
    rounds = []
    with Progress(console=console) as progress:
        for brokers, plan in kills.plans():
            bar = progress.add_task(f"{brokers} brokers, seed {plan.seed}", total=plan.kills)
            kept = directory / f"round-{plan.seed}.json"
            if not kept.exists():
                found = _round(plan, brokers, directory / f"round-{plan.seed}", progress, bar)
                kept.write_text(json.dumps(found))
            rounds.append(json.loads(kept.read_text()))
            progress.update(bar, completed=plan.kills)
    console.print(_table(rounds))
    append_rows(
        "faults",
        _rows(rounds),
        conditions=_conditions(rounds),
        packages=_PACKAGES,
        clock=time.time,
        directory=results_dir,
    )
    problems = [problem for found in rounds for problem in found["problems"]]
    for problem in problems:
        console.print(problem, style="red", markup=False)
    return 1 if problems else 0


def _round(
    plan: Plan, brokers: int, directory: Path, progress: Progress, bar: Any
) -> dict[str, Any]:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    started_s = time.monotonic()
    cluster = running_kafka(
        directory / "kafka", nodes=brokers, extra=_PATIENT if brokers > 1 else None
    )
    with cluster as kafka, running_postgres() as postgres:
        site = open_site(
            directory / "site",
            plan,
            kafka=kafka,
            topic=f"campaign-{secrets.token_hex(4)}",
            postgres=postgres,
            catalog_url=postgres.create_database(),
        )
        with site as opened:
            outcome = Campaign(
                opened,
                plan,
                on_step=lambda kills, stored: progress.update(
                    bar, completed=kills, description=f"{brokers} brokers, {stored} records stored"
                ),
            ).run()
    problems = outcome.count.problems()
    if not problems:
        shutil.rmtree(directory)
    return {
        "brokers": brokers,
        "seed": plan.seed,
        "seconds": round(time.monotonic() - started_s),
        "problems": problems,
        **says(outcome),
    }


def _rows(rounds: Sequence[dict[str, Any]]) -> list[Row]:
    total = {name: sum(found[name] for found in rounds) for name in _SUMS}
    against = f"{total['acknowledged']} acknowledged traces"
    return [
        Row(metric="kills", value=total["kills"], unit="SIGKILLs"),
        Row(metric="lost", value=total["lost"], unit="traces", against=against),
        Row(metric="doubled", value=total["doubled"], unit="traces", against=against),
    ]


def _conditions(rounds: Sequence[dict[str, Any]]) -> dict[str, object]:
    """What was run; the tallies of all rounds together, kills by the place where they hit."""
    merged: dict[str, Counter[str]] = {name: Counter() for name in _TALLIES}
    for name, tally in merged.items():
        for found in rounds:
            tally.update(found[name])
    return {
        "brokers": [found["brokers"] for found in rounds],
        "seeds": [found["seed"] for found in rounds],
        "seconds": sum(found["seconds"] for found in rounds),
        **{name: sum(found[name] for found in rounds) for name in (*_SUMS, "erased")},
        **{name: dict(sorted(tally.items())) for name, tally in merged.items()},
        "problems": [problem for found in rounds for problem in found["problems"]],
    }


def _table(rounds: Sequence[dict[str, Any]]) -> Table:
    names = ("brokers", "seed", "seconds", "kills", "acknowledged", "stored", "lost", "doubled")
    table = Table(*names)
    for found in rounds:
        table.add_row(*(str(found[name]) for name in names))
    return table
