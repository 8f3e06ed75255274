"""What a scaling run has measured so far, kept beside its data so that a stopped run goes on."""

import json
import os
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

from draftkeep.files import write_file

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One measured value of a step of a phase, when `at` traces (or keys, or shards) were there.

    `value` is in `unit`. Where it is a time, it is elapsed time and `cpu` is what of it this
    process spent on a CPU; where it is none, `cpu` is 0.
    """

    phase: str
    step: str
    at: int
    value: float
    unit: str
    cpu: float = 0.0


class Points:
    """Points in a file of one JSON object a line; of two of one step and place the later counts.

    A line that a kill cut short is dropped.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        text = path.read_text() if path.exists() else ""
        self._all: dict[tuple[str, str, int], Point] = {}
        for line in text.splitlines(keepends=True):
            if line.endswith("\n"):
                self._keep(Point(**json.loads(line)))
        if text and not text.endswith("\n"):
            self._rewrite()

    def add(self, point: Point) -> None:
        """Keep a point; durable when this returns."""
        self._keep(point)
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(point)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def has(self, phase: str, step: str, at: int) -> bool:
        """Whether that was measured."""
        return (phase, step, at) in self._all

    def forget(self, phase: str, *, beyond: int) -> None:
        """Drop the points of a phase whose data is no longer there."""
        kept = [point for point in self._all.values() if point.phase != phase or point.at <= beyond]
        if len(kept) < len(self._all):
            self._all.clear()
            for point in kept:
                self._keep(point)
            self._rewrite()

    def of(self, phase: str, step: str) -> list[Point]:
        """The points of one step, in order."""
        found = [
            point for point in self._all.values() if (point.phase, point.step) == (phase, step)
        ]
        return sorted(found, key=lambda point: point.at)

    def steps(self, phase: str) -> list[str]:
        """Every step of a phase, in the order of its first point."""
        return list(dict.fromkeys(step for known, step, _ in self._all if known == phase))

    def _keep(self, point: Point) -> None:
        self._all[(point.phase, point.step, point.at)] = point

    def _rewrite(self) -> None:
        lines = (json.dumps(asdict(point)) + "\n" for point in self._all.values())
        write_file(self._path, "".join(lines).encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Took:
    """What some work took, in milliseconds: elapsed, and on a CPU in this process."""

    ms: float
    cpu_ms: float

    def over(self, count: float) -> "Took":
        """What one of `count` took."""
        return Took(ms=self.ms / count, cpu_ms=self.cpu_ms / count)


def timed(work: Callable[[], Result]) -> tuple[Result, Took]:
    """Do the work once."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    result = work()
    took = Took(ms=1e3 * (time.perf_counter() - wall_s), cpu_ms=1e3 * (time.process_time() - cpu_s))
    return result, took


def middle(taken: Iterable[Took]) -> Took:
    """The medians."""
    listed = list(taken)
    return Took(
        ms=median(took.ms for took in listed), cpu_ms=median(took.cpu_ms for took in listed)
    )


def checkpoints(total: int) -> list[int]:
    """Where a run of `total` is measured: 1, 3, 10, 30 and 100 hundredths of it."""
    return sorted({max(1, total * part // 100) for part in (1, 3, 10, 30, 100)})


def reset_peak() -> None:
    """Begin a new peak of resident memory, where the system can."""
    reset = Path("/proc/self/clear_refs")
    if reset.exists():
        reset.write_text("5")


def peak_mib() -> float:
    """The peak of resident memory since `reset_peak`, in MiB."""
    status = Path("/proc/self/status")
    if status.exists():
        lines: Sequence[str] = status.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
