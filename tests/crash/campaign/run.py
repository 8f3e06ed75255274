"""A fault campaign: real processes on a real broker and database, killed again and again.

Nodes seal traces into their embedded logs, forwarders move them to Kafka, compactors into shards
on one PostgreSQL catalog, while others merge, rewrite erased rows and sweep. Any of them is killed
or frozen at any moment, and so are brokers and database. Then the killing stops, what is under way
drains, and everything is counted.
"""

import contextlib
import random
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import sqlalchemy as sa

from draftkeep.errors import StoreError
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.store.rewriter import random_serial, rewrite_erased
from draftkeep.store.storage import open_storage
from draftkeep.store.sweeper import Sweeper
from tests.crash.campaign.count import Count, count, end_offsets
from tests.crash.campaign.crowd import Crowd, Tally
from tests.crash.campaign.plan import Outage, Plan, Weather, blows, outages
from tests.crash.campaign.site import DOOMED, Site, log_dir, node_config

_PATIENCE_S = 180.0
# After so many kills something must have been stored, or the kills would all meet processes that
# are starting.
_PACE_KILLS = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What was done and what was there afterwards."""

    tally: Tally
    count: Count


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
        self._on_step = on_step
        self._draw = random.Random(plan.seed)
        self._outages = outages(plan, len(site.kafka.nodes), self._draw)
        self._under_way: list[Future[None]] = []
        self._tally = Tally()
        self._crowd = Crowd(site, plan, self._draw, self._tally)

    def run(self) -> Outcome:
        """Kill, drain, count. Raises RuntimeError where what runs comes to a halt."""
        with ThreadPoolExecutor(1) as weather, contextlib.closing(self._crowd):
            self._wait(lambda: self._stored() > 0, "anything is stored")
            self._kill(weather)
            for future in self._under_way:
                future.result()
            self._crowd.calm()
            self._wait(self._is_drained, "all logs are empty")
        self._tidy()
        return Outcome(
            tally=self._tally,
            count=count(self._site, nodes=self._plan.nodes, partitions=self._plan.partitions),
        )

    def _kill(self, weather: ThreadPoolExecutor) -> None:
        paced = stored = 0
        for blow in blows(self._plan, self._draw):
            if self._tally.kills >= self._plan.kills:
                return
            self._crowd.pass_time(blow.wait_s)
            if not self._plan.aims:
                self._crowd.strike(blow)
            self._break_services(weather)
            if self._tally.kills >= paced + _PACE_KILLS:
                paced, stored = self._tally.kills, self._await_more(stored)
                self._on_step(paced, stored)
                self._erase(self._draw.randrange(DOOMED))

    def _break_services(self, weather: ThreadPoolExecutor) -> None:
        while self._outages and self._tally.kills >= self._outages[0].after_kills:
            outage = self._outages.pop(0)
            self._under_way.append(weather.submit(_suffer, self._site, outage))
            self._tally.weather[outage.weather] += 1

    def _await_more(self, stored: int) -> int:
        """Wait until the compactors have got further than `stored`; where they are then."""
        more = stored

        def is_more() -> bool:
            nonlocal more
            more = self._stored()
            return more > stored

        self._wait(is_more, "more is stored")
        return more

    def _erase(self, number: int) -> None:
        self._wait(lambda: self._site.erase(number), "a subject is erased")
        self._tally.erased += 1

    def _stored(self) -> int:
        with self._site.catalog.read() as connection:
            return int(connection.scalar(sa.text("SELECT coalesce(sum(next), 0) FROM offsets")))

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
        site, storage = self._site, open_storage(self._site.config)
        rewrite_erased(site.catalog, storage, now_s=time.time(), new_serial=random_serial)
        later_s = time.time() + 1
        Sweeper(site.catalog, storage, clock=lambda: later_s, grace_s=0).run_once()

    def _wait(self, until: Callable[[], bool], what: str) -> None:
        """Ask again until it is so; a database that is away has no answer yet."""
        deadline_s = time.monotonic() + _PATIENCE_S
        while True:
            with contextlib.suppress(StoreError):
                if until():
                    return
            if time.monotonic() > deadline_s:
                words = self._crowd.last_words()
                raise RuntimeError(f"waited {_PATIENCE_S:g} s until {what}; {words}")
            self._crowd.pass_time(0.1)


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
        "freezes": sum(tally.freezes.values()),
        "erased": tally.erased,
        "exits": tally.exits,
        **asdict(outcome.count),
        "places": dict(sorted(tally.places.items())),
        "frozen_places": dict(sorted(tally.freezes.items())),
    }
