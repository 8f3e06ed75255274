"""A fault campaign: real processes on a real broker and database, killed again and again.

Nodes seal traces into their embedded logs, forwarders move them to Kafka, compactors into shards
on one PostgreSQL catalog, while others merge, rewrite erased rows and sweep. Any of them is killed
or frozen at any moment, and so are brokers and database. Then the killing stops, what is under way
drains, and everything is counted.
"""

import contextlib
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from draftkeep.errors import StoreError
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.store.rewriter import random_serial, rewrite_erased
from draftkeep.store.sweeper import Sweeper
from tests.crash.campaign.count import Count, count, end_offsets
from tests.crash.campaign.plan import Blow, Outage, Plan, Weather, blows, outages
from tests.crash.campaign.points import Aim, index_of, places
from tests.crash.campaign.server import GAVE_UP
from tests.crash.campaign.site import DOOMED, Site, log_dir, node_config
from tests.crash.forking import ForkServer

_PATIENCE_S = 180.0
# After so many kills something must have been stored, or the kills would all meet processes that
# are starting.
_PACE_KILLS = 6
_AIMED = 0.5


@dataclass(slots=True, kw_only=True)
class Tally:
    """What was done: SIGKILLs by role and place, freezes, outages of services, erasures.

    `exits` counts processes that gave up with an error of ours and were started again, as a
    supervisor would.
    """

    places: Counter[str] = field(default_factory=Counter)
    weather: Counter[str] = field(default_factory=Counter)
    freezes: int = 0
    erased: int = 0
    exits: int = 0

    @property
    def kills(self) -> int:
        """SIGKILLs of our processes; those of services are counted apart."""
        return sum(self.places.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was done and what was there afterwards."""

    tally: Tally
    count: Count


@dataclass(slots=True, kw_only=True)
class _Slot:
    """One process that is kept running, over all its lives."""

    role: str
    number: int
    pid: int = 0
    lives: int = 0
    thaw_at_s: float = 0.0


class Campaign:
    """One campaign at a site. `on_step(kills, stored)` is told how far it is."""

    def __init__(
        self,
        site: Site,
        plan: Plan,
        *,
        on_step: Callable[[int, int], None] = lambda _kills, _stored: None,
    ) -> None:
        self._site = site
        self._plan = plan
        self._draw = random.Random(plan.seed)
        self._on_step = on_step
        self._slots = [_Slot(role=role, number=number) for role, number in plan.slots()]
        self._tally = Tally()
        self._outages = outages(plan, len(site.kafka.nodes), self._draw)
        self._weather = ThreadPoolExecutor(1, thread_name_prefix="weather")
        self._under_way: list[Future[None]] = []
        self._aiming = True
        self._server = ForkServer(
            "tests.crash.campaign.server",
            {
                "config": site.config.model_dump(mode="json"),
                "planted": plan.planted,
                "seed": plan.seed,
            },
            errors=self.errors,
        )

    @property
    def errors(self) -> Path:
        """What the processes printed."""
        return self._site.directory / "errors.txt"

    def run(self) -> Outcome:
        """Kill, drain, count. Raises RuntimeError where what runs comes to a halt."""
        try:
            for slot in self._slots:
                self._start(slot)
            self._wait(lambda: self._stored() > 0, "anything is stored")
            self._kill_all()
            for future in self._under_way:
                future.result()
            self._drain()
        finally:
            self._weather.shutdown()
            self._server.close()
        self._tidy()
        return Outcome(
            tally=self._tally,
            count=count(self._site, nodes=self._plan.nodes, partitions=self._plan.partitions),
        )

    def _kill_all(self) -> None:
        paced = stored = 0
        for blow in blows(self._plan, self._draw):
            if self._tally.kills >= self._plan.kills:
                return
            self._sleep(blow.wait_s)
            self._strike(blow)
            self._break_services()
            if self._tally.kills >= paced + _PACE_KILLS:
                paced, stored = self._tally.kills, self._await_more(stored)
                self._on_step(paced, stored)
                self._erase(self._draw.randrange(DOOMED))

    def _erase(self, number: int) -> None:
        self._wait(lambda: self._site.erase(number), "a subject is erased")
        self._tally.erased += 1

    def _await_more(self, stored: int) -> int:
        """Wait until the compactors have got further than `stored`; where they are then."""
        more = stored

        def is_more() -> bool:
            nonlocal more
            more = self._stored()
            return more > stored

        self._wait(is_more, "more is stored")
        return more

    def _strike(self, blow: Blow) -> None:
        slot = self._slots[blow.slot]
        if blow.freeze_s and not self._plan.aims:
            os.kill(slot.pid, signal.SIGSTOP)
            slot.thaw_at_s = time.monotonic() + blow.freeze_s
            self._tally.freezes += 1
        elif not self._plan.aims:
            self._bury(slot, self._server.kill(slot.pid))

    def _sleep(self, wait_s: float) -> None:
        """Meanwhile frozen processes thaw, and the dead are replaced."""
        until_s = time.monotonic() + wait_s
        while True:
            now_s = time.monotonic()
            for slot in self._slots:
                if ended := self._server.look(slot.pid):
                    self._bury(slot, ended)
                elif slot.thaw_at_s and (now_s >= slot.thaw_at_s or not self._aiming):
                    slot.thaw_at_s = 0.0
                    os.kill(slot.pid, signal.SIGCONT)
            if now_s >= until_s:
                return
            time.sleep(min(0.05, until_s - now_s))

    def _start(self, slot: _Slot) -> None:
        slot.lives += 1
        slot.thaw_at_s = 0.0
        aim = self._draw_aim(slot.role) if self._aiming else None
        slot.pid = self._server.start(
            slot.role,
            number=slot.number,
            partitions=self._plan.partitions,
            acks=str(self._site.acks_dir / f"node-{slot.number}.{slot.lives}"),
            aim=None if aim is None else asdict(aim),
        )

    def _draw_aim(self, role: str) -> Aim | None:
        draw = self._draw
        wanted = index_of(role, self._plan.aims)
        if not wanted and not self._plan.aims and draw.random() < _AIMED:
            wanted = list(range(1, len(places(role))))
        if not wanted:
            return None
        return Aim(
            place=draw.choice(wanted),
            pass_=draw.choice([1, 1, 2, 5]),
            delay_s=0.0 if self._plan.aims else draw.choice([0.0, 0.0, 0.001, 0.01]),
        )

    def _bury(self, slot: _Slot, ended: dict[str, int]) -> None:
        """Count an end and start the next life."""
        if ended.get("signal") == signal.SIGKILL:
            self._tally.places[f"{slot.role}: {places(slot.role)[ended['mark']]}"] += 1
        elif ended.get("exit") == GAVE_UP:
            self._tally.exits += 1
        else:
            raise RuntimeError(f"a process ended with {ended}; {self._last_words()}")
        self._start(slot)

    def _break_services(self) -> None:
        while self._outages and self._tally.kills >= self._outages[0].after_kills:
            outage = self._outages.pop(0)
            self._under_way.append(self._weather.submit(_suffer, self._site, outage))
            self._tally.weather[outage.weather] += 1

    def _drain(self) -> None:
        """Stop the nodes and the killing, and let the rest come to its end."""
        self._aiming = False
        self._sleep(0.0)
        for slot in list(self._slots):
            self._server.kill(slot.pid)
            if slot.role == "node":
                self._slots.remove(slot)
            else:
                self._start(slot)
        self._wait(self._is_drained, "all logs are empty")

    def _is_drained(self) -> bool:
        for number in range(self._plan.nodes):
            log = SqliteLog.open_reader(log_dir(node_config(self._site.config, number)))
            first, following = log.bounds()
            if first != following:
                return False
        query = sa.text("SELECT partition, next FROM offsets")
        with self._site.catalog.read() as connection:
            stored: dict[int, int] = {row.partition: row.next for row in connection.execute(query)}
        ends = end_offsets(self._site, self._plan.partitions)
        return all(stored.get(partition, 0) == end for partition, end in ends.items())

    def _tidy(self) -> None:
        """What the chores would come to in the end."""
        site = self._site
        rewrite_erased(site.catalog, site.shards_dir, now_s=time.time(), new_serial=random_serial)
        later_s = time.time() + 1
        Sweeper(site.catalog, site.shards_dir, clock=lambda: later_s, grace_s=0).run_once()

    def _stored(self) -> int:
        with self._site.catalog.read() as connection:
            return int(connection.scalar(sa.text("SELECT coalesce(sum(next), 0) FROM offsets")))

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        """Ask again until it is so; a database that is away has no answer yet."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            with contextlib.suppress(StoreError):
                if until():
                    return
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"waited {_PATIENCE_S:g} s until {what}; {self._last_words()}")
            self._sleep(0.1)

    def _last_words(self) -> str:
        return f"the processes said:\n{self.errors.read_text(errors='replace')[-6000:]}"


def _suffer(site: Site, outage: Outage) -> None:
    broker = site.kafka.nodes[outage.node]
    match outage.weather:
        case Weather.BROKER_KILLED:
            broker.kill()
            time.sleep(outage.down_s)
            site.kafka.restart(broker)
        case Weather.BROKER_FROZEN:
            broker.freeze()
            try:
                time.sleep(outage.down_s)
            finally:
                broker.thaw()
        case Weather.DATABASE_CRASHED:
            site.postgres.crash()
            time.sleep(outage.down_s)
            site.postgres.start()


def says(outcome: Outcome) -> dict[str, Any]:
    """The figures of an outcome, for a row of results or a person."""
    tally = outcome.tally
    return {
        "kills": tally.kills,
        "weather": {str(what): times for what, times in sorted(tally.weather.items())},
        "freezes": tally.freezes,
        "erased": tally.erased,
        "exits": tally.exits,
        **asdict(outcome.count),
        "places": dict(sorted(tally.places.items())),
    }
