"""The results file of a bench: one JSON object a line, appended and never rewritten."""

import json
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

RESULTS_DIR = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One measured value. `against` is what it is compared with, empty where it stands alone."""

    metric: str
    value: float
    unit: str
    against: str = ""


def append_rows(
    bench: str,
    rows: Iterable[Row],
    *,
    conditions: dict[str, object],
    packages: Iterable[str],
    clock: Callable[[], float],
    directory: Path = RESULTS_DIR,
) -> Path:
    """Append rows to `directory`/<bench>.jsonl and return that file.

    `conditions` says what was run; the versions of Python and of `packages` are added, and the
    commit of the working tree, with a plus sign where it holds changes.
    """
    common = {
        "conditions": conditions,
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in packages},
    }
    stamp = {
        "date": datetime.fromtimestamp(clock(), UTC).isoformat(timespec="seconds"),
        "commit": commit(),
    }
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{bench}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(stamp | asdict(row) | common) + "\n")
    return path


def commit() -> str:
    """The commit of the working tree, with a plus sign where it holds changes beside results."""
    head = _git("rev-parse", "--short=12", "HEAD")
    code = (":(top)", ":(top,exclude)bench/results")
    return (head or "unknown") + "+" * bool(
        _git("status", "--porcelain", "--untracked-files=no", "--", *code)
    )


def _git(*arguments: str) -> str:
    """What git says; nothing where there is no git, or no repository."""
    git = shutil.which("git")
    if git is None:
        return ""
    done = subprocess.run(
        [git, *arguments], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()
