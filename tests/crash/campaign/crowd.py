"""The crowd of a campaign: the processes that are kept running, over all their lives."""

import os
import random
import signal
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.crash.campaign.plan import Blow, Plan
from tests.crash.campaign.points import Aim, index_of, places
from tests.crash.campaign.server import GAVE_UP
from tests.crash.campaign.site import Site
from tests.crash.forking import ForkServer

_AIMED = 0.5
_AIMED_FREEZES = 0.25
# Longer than the group waits for a member that says nothing.
_FREEZE_S = 3.0


@dataclass(slots=True, kw_only=True)
class Tally:
    """What was done: SIGKILLs and freezes by role and place, outages of services, erasures.

    `exits` counts processes that gave up with an error of ours and were started again, as a
    supervisor would.
    """

    places: Counter[str] = field(default_factory=Counter)
    freezes: Counter[str] = field(default_factory=Counter)
    weather: Counter[str] = field(default_factory=Counter)
    erased: int = 0
    exits: int = 0

    @property
    def kills(self) -> int:
        """SIGKILLs of our processes; those of services are counted apart."""
        return sum(self.places.values())


@dataclass(slots=True, kw_only=True)
class _Slot:
    """One process that is kept running."""

    role: str
    number: int
    pid: int = 0
    lives: int = 0
    thaw_at_s: float = 0.0


class Crowd:
    """Starts every process of a plan, and starts it again whenever it has died.

    Owns the fork server; `errors` is the file with what the processes print. Everything happens
    in the caller's thread, within `pass_time`.
    """

    def __init__(self, site: Site, plan: Plan, draw: random.Random, tally: Tally) -> None:
        self._plan = plan
        self._draw = draw
        self._tally = tally
        self._acks_dir = site.acks_dir
        self._aiming = True
        self._slots = [_Slot(role=role, number=number) for role, number in plan.slots()]
        self.errors: Path = site.directory / "errors.txt"
        self._server = ForkServer(
            "tests.crash.campaign.server",
            {
                "config": site.config.model_dump(mode="json"),
                "planted": plan.planted,
                "seed": plan.seed,
            },
            errors=self.errors,
        )
        for slot in self._slots:
            self._start(slot)

    def strike(self, blow: Blow) -> None:
        """Kill a process, or stop it for a while."""
        slot = self._slots[blow.slot]
        if blow.freeze_s:
            os.kill(slot.pid, signal.SIGSTOP)
            slot.thaw_at_s = time.monotonic() + blow.freeze_s
        else:
            self._heed(slot, self._server.kill(slot.pid))

    def pass_time(self, seconds: float) -> None:
        """Wait; meanwhile those that were stopped go on, and the dead are replaced.

        Raises RuntimeError where one ended otherwise than by SIGKILL or an error of ours.
        """
        until_s = time.monotonic() + seconds
        while True:
            now_s = time.monotonic()
            for slot in self._slots:
                if ended := self._server.look(slot.pid):
                    self._heed(slot, ended)
                elif slot.thaw_at_s and now_s >= slot.thaw_at_s:
                    slot.thaw_at_s = 0.0
                    os.kill(slot.pid, signal.SIGCONT)
            if now_s >= until_s:
                return
            time.sleep(min(0.05, until_s - now_s))

    def calm(self) -> None:
        """End the nodes for good and start the others anew, to die no more; not in the tally."""
        self._aiming = False
        for slot in list(self._slots):
            self._server.kill(slot.pid)
            if slot.role == "node":
                self._slots.remove(slot)
            else:
                self._start(slot)

    def last_words(self) -> str:
        """The end of what the processes printed, for the message of an error."""
        return f"the processes said:\n{self.errors.read_text(errors='replace')[-6000:]}"

    def close(self) -> None:
        """Kill them all; not in the tally."""
        self._server.close()

    def _start(self, slot: _Slot) -> None:
        slot.lives += 1
        slot.thaw_at_s = 0.0
        aim = self._draw_aim(slot.role) if self._aiming else None
        slot.pid = self._server.start(
            slot.role,
            number=slot.number,
            acks=str(self._acks_dir / f"node-{slot.number}.{slot.lives}"),
            aim=None if aim is None else asdict(aim),
        )

    def _draw_aim(self, role: str) -> Aim | None:
        draw, aims = self._draw, self._plan.aims
        wanted = index_of(role, aims)
        if not aims and draw.random() < _AIMED:
            wanted = list(range(1, len(places(role))))
        if not wanted:
            return None
        return Aim(
            place=draw.choice(wanted),
            pass_=draw.choice([1, 1, 2, 5]),
            delay_s=0.0 if aims else draw.choice([0.0, 0.0, 0.001, 0.01]),
            freeze=not aims and draw.random() < _AIMED_FREEZES,
        )

    def _heed(self, slot: _Slot, ended: dict[str, int]) -> None:
        """Count an end and start the next life, or let a stopped process go on later."""
        if ended.get("exit") not in (None, GAVE_UP):
            raise RuntimeError(f"a process ended with {ended}; {self.last_words()}")
        if "exit" in ended:
            self._tally.exits += 1
            self._start(slot)
            return
        place = f"{slot.role}: {places(slot.role)[ended['mark']]}"
        if "stopped" in ended:
            slot.thaw_at_s = slot.thaw_at_s or time.monotonic() + _FREEZE_S
            self._tally.freezes[place] += 1
            return
        if ended["signal"] != signal.SIGKILL:
            raise RuntimeError(f"a process ended with {ended}; {self.last_words()}")
        self._tally.places[place] += 1
        self._start(slot)
