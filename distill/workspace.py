"""Workspace: what a job leaves on disk so that it can go on after it was stopped.

    <state>/jobs/lock             held by the one job that runs
    <state>/jobs/<id>/job.json    what the job set out to do
    <state>/jobs/<id>/checkpoint.safetensors

A job's directory goes when the job ends; its record stays in the catalog.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from draftkeep.errors import BusyError, StoreError
from draftkeep.files import write_file
from draftkeep.store.jobs import JobInput

_JOB_FILE = "job.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """What a job set out to do; a resumed job must do the same.

    `base` says what training starts from and how, so that a plan made under another configuration
    is told apart. `trace_ids` and `inputs` are what it learns from, `vocab_ids` what its drafter
    may propose.
    """

    job_id: str
    scope: str
    base: str
    started_s: float
    trace_ids: tuple[bytes, ...]
    inputs: tuple[JobInput, ...]
    vocab_ids: tuple[int, ...]


@contextmanager
def only_job(jobs_dir: Path) -> Iterator[None]:
    """Hold the lock that one job at a time has; BusyError where another runs.

    Whoever may write to the directory may take the lock, whichever user made it.
    """
    jobs_dir.mkdir(parents=True, exist_ok=True)
    handle = os.open(jobs_dir / "lock", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        # Only its owner may, and then it is as it should be or another's directory.
        with suppress(PermissionError):
            os.fchmod(handle, jobs_dir.stat().st_mode & 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise BusyError(
                "another distillation job runs on this state directory; wait for it to end"
            ) from None
        yield
    finally:
        os.close(handle)


def save_plan(directory: Path, plan: JobPlan) -> None:
    """Write the plan durably."""
    values = asdict(plan) | {"format": _FORMAT}
    write_file(directory / _JOB_FILE, json.dumps(values, default=bytes.hex).encode())


def load_plans(jobs_dir: Path) -> list[tuple[Path, JobPlan | None]]:
    """Every job directory with its plan, None where that cannot be read."""
    found = sorted(path for path in jobs_dir.glob("*") if path.is_dir())
    return [(path, _load(path / _JOB_FILE)) for path in found]


def drop(directory: Path) -> None:
    """Remove a job's directory with its checkpoint; nothing to do where there is none.

    Raises StoreError where any of it is left.
    """
    try:
        if directory.is_symlink() or directory.exists():
            shutil.rmtree(directory)
    except OSError as error:
        raise StoreError(
            f"{directory} cannot be removed ({error.strerror or error}); it may hold a checkpoint "
            "that learned from erased traces: mend its permissions or its disk, or delete it by "
            "hand; until then it is tried again at every call"
        ) from error


def _load(path: Path) -> JobPlan | None:
    try:
        values: Any = json.loads(path.read_bytes())
        names = {item.name for item in fields(JobPlan)}
        if values.pop("format") != _FORMAT or set(values) != names:
            return None
        inputs = [
            JobInput(
                tenant=item["tenant"],
                alias=bytes.fromhex(item["alias"]),
                period_id=bytes.fromhex(item["period_id"]),
                positions=item["positions"],
            )
            for item in values["inputs"]
        ]
        values["inputs"] = tuple(inputs)
        values["trace_ids"] = tuple(bytes.fromhex(item) for item in values["trace_ids"])
        values["vocab_ids"] = tuple(values["vocab_ids"])
        return JobPlan(**values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
