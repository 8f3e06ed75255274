"""The rows of a scaling run: each step's cost at the end, and over its cost early."""

import time
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

from rich.box import SIMPLE
from rich.table import Table

from bench.results import Row, append_rows
from bench.scale.points import Point, checkpoints
from bench.scale.run import Run

_PACKAGES = ("cryptography", "duckdb", "psycopg", "PyNaCl", "pyarrow", "SQLAlchemy")


def append(run: Run, phase: str, *, seconds: float, directory: Path) -> None:
    """Append a phase's rows: `<phase>_<step>`, and `<phase>_<step>_flat_ratio` beside a cost.

    A ratio is of the last checkpoint over the one at a tenth of it. The conditions give the whole
    curve, by how much was there, in elapsed time and in time on a CPU.
    """
    for step, points in _steps(run, phase):
        last = points[-1]
        rows = [Row(metric=f"{phase}_{step}", value=last.value, unit=last.unit)]
        early = _early(points)
        if early is not None:
            rows.append(
                Row(
                    metric=f"{phase}_{step}_flat_ratio",
                    value=last.value / early.value,
                    unit="ratio",
                    against=f"the same with {early.at:,}",
                )
            )
        append_rows(
            "scale",
            rows,
            conditions={
                "phase": phase,
                "step": step,
                "at": last.at,
                "curve": {str(point.at): round(point.value, 5) for point in points},
                "cpu_curve": {str(point.at): round(point.cpu, 5) for point in points if point.cpu},
                "sizes": asdict(run.sizes),
                "phase_seconds": round(seconds, 1),
            },
            packages=_PACKAGES,
            clock=time.time,
            directory=directory,
        )


def show(run: Run, phase: str) -> None:
    """The same for a person."""
    found = _steps(run, phase)
    stops = sorted({point.at for _, points in found for point in points})
    table = Table("step", *(f"{at:,}" for at in stops), "ratio", "unit", title=phase, box=SIMPLE)
    for step, points in found:
        values = {point.at: f"{point.value:,.3g}" for point in points}
        early = _early(points)
        ratio = "" if early is None else f"{points[-1].value / early.value:.2f}"
        table.add_row(step, *(values.get(at, "") for at in stops), ratio, points[0].unit)
    run.console.print(table)


def _steps(run: Run, phase: str) -> list[tuple[str, list[Point]]]:
    """Each step's points at the checkpoints: the last one up to each."""
    stops = [point.at for point in run.points.of(phase, "peak_rss")]
    found = []
    for step in run.points.steps(phase):
        points: list[Point] = []
        for before, stop in pairwise([0, *stops]):
            between = [p for p in run.points.of(phase, step) if before < p.at <= stop]
            points += [replace(point, at=stop) for point in between[-1:]]
        if points:
            found.append((step, points))
    return found


def _early(points: list[Point]) -> Point | None:
    """The checkpoint at a tenth of the last, where that was measured."""
    wanted = checkpoints(points[-1].at)[2] if len(checkpoints(points[-1].at)) == 5 else None
    return next((point for point in points if point.at == wanted and point.value > 0), None)
