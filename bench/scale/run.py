"""The run that the phases of the scaling bench share: where its data lies, and what it measured."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

from bench.scale.points import Point, Points, Took, peak_mib, reset_peak
from draftkeep.errors import InputError
from draftkeep.files import write_file

MS = "ms"
PER_1000 = "ms/1,000"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much of everything a run makes; `scale.py` has a line on each."""

    headers: int = 10_000_000
    per_bucket: int = 100_000
    bucket: int = 1_800_000
    traces: int = 1_000_000
    subjects: int = 100_000
    keys: int = 1_000_000
    shards: int = 100_000
    batch: int = 4096


class Bar:
    """One line of progress."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def at(self, done: int) -> None:
        """So much is done."""
        self._progress.update(self._task, completed=done)


class Run:
    """Points, directory and sizes of one run; a phase adds points and asks which it has."""

    def __init__(self, directory: Path, sizes: Sizes, console: Console) -> None:
        """Begin in an empty directory, or go on in one of the same sizes.

        Raises InputError where the directory is of a run of other sizes.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self.sizes = sizes
        self.console = console
        self._claim(directory / "sizes.json")
        self.points = Points(directory / "points.jsonl")
        self._journal = directory / "finished.json"
        known = self._journal.exists()
        self.finished: list[str] = json.loads(self._journal.read_bytes()) if known else []

    def _claim(self, path: Path) -> None:
        mine = asdict(self.sizes)
        if not path.exists():
            write_file(path, json.dumps(mine).encode())
        found = json.loads(path.read_bytes())
        if found != mine:
            raise InputError(
                f"{path.parent} holds a run of other sizes, {found}; give it those, or another "
                "directory, or --fresh"
            )

    def finish(self, phase: str) -> None:
        """The phase's rows are written."""
        self.finished.append(phase)
        write_file(self._journal, json.dumps(self.finished).encode())

    def add(self, phase: str, step: str, at: int, took: Took, unit: str) -> None:
        """Keep what a step took."""
        self.points.add(
            Point(phase=phase, step=step, at=at, value=took.ms, unit=unit, cpu=took.cpu_ms)
        )

    def add_value(self, phase: str, step: str, at: int, value: float, unit: str) -> None:
        """Keep a value that is no time."""
        self.points.add(Point(phase=phase, step=step, at=at, value=value, unit=unit))

    def add_peak(self, phase: str, at: int, step: str = "peak_rss") -> None:
        """Keep the peak of memory since the last one, and begin another."""
        self.add_value(phase, step, at, peak_mib(), "MiB")
        reset_peak()

    @contextmanager
    def bar(self, title: str, total: int) -> Iterator[Bar]:
        """A line of progress."""
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console) as progress:
            yield Bar(progress, progress.add_task(title, total=total))
