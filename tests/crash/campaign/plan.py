"""What a fault campaign does, drawn beforehand from one seed."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

# How often each role is hit, for one that runs once. Forwarders and compactors are the point.
_WEIGHTS = {"node": 1, "forward": 3, "compact": 3, "chores": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How many processes run and how many are killed.

    Of every node's log there is one forwarder, and of the first `rivals` logs a second one.
    `outages` times a broker or the database goes away while the others go on. `planted` names a
    fault of `plants`, and `aims` are the only places where processes then die, as `points` spells
    them; without aims, about half of the processes are told a place and the rest die by the clock.
    """

    kills: int
    seed: int
    nodes: int = 2
    rivals: int = 1
    compactors: int = 3
    partitions: int = 4
    outages: int = 3
    planted: str = ""
    aims: tuple[str, ...] = ()

    def slots(self) -> list[tuple[str, int]]:
        """Role and number of every process that is kept running."""
        numbers = {
            "node": [*range(self.nodes)],
            "forward": [*range(self.nodes), *range(self.rivals)],
            "compact": [*range(self.compactors)],
            "chores": [0],
        }
        return [(role, number) for role, those in numbers.items() for number in those]


@dataclass(frozen=True, slots=True, kw_only=True)
class Blow:
    """One thing that happens: after `wait_s`, to slot `slot`.

    `freeze_s` above 0 stops the process for that long and lets it live: it comes back with a view
    of the world that is that old.
    """

    slot: int
    wait_s: float
    freeze_s: float


class Weather(StrEnum):
    """What befalls a service."""

    BROKER_KILLED = "broker killed"
    BROKER_FROZEN = "broker frozen"
    DATABASE_CRASHED = "database crashed"


_DOWN_S = {
    Weather.BROKER_KILLED: (0.0, 1.0, 3.0),
    Weather.BROKER_FROZEN: (2.0, 7.0),
    Weather.DATABASE_CRASHED: (0.0, 1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """A service goes away once so many kills are done, and is back after `down_s`.

    `node` is the number of the broker.
    """

    after_kills: int
    weather: Weather
    node: int
    down_s: float


def blows(plan: Plan, draw: random.Random) -> Iterator[Blow]:
    """Without end; short and long lives, one blow in ten a freeze."""
    slots = plan.slots()
    weights = [_WEIGHTS[role] for role, _ in slots]
    while True:
        (slot,) = draw.choices(range(len(slots)), weights)
        yield Blow(
            slot=slot,
            wait_s=draw.random() * draw.choice([0.02, 0.3, 1.2]),
            freeze_s=draw.choice([0.3, 3.0]) if draw.random() < 0.1 else 0.0,
        )


def outages(plan: Plan, brokers: int, draw: random.Random) -> list[Outage]:
    """Spread over the campaign, each kind in turn."""
    step = plan.kills / (plan.outages + 1)
    kinds = list(Weather)
    return [
        Outage(
            after_kills=int(step * (number + 1)),
            weather=(kind := kinds[number % len(kinds)]),
            node=draw.randrange(brokers),
            down_s=draw.choice(_DOWN_S[kind]),
        )
        for number in range(plan.outages)
    ]
