"""The lock of jobs is open to whoever may write to their directory."""

import os
from pathlib import Path

import pytest

from draftkeep.distill.workspace import only_job
from draftkeep.errors import BusyError


@pytest.mark.parametrize(("directory", "lock"), [(0o2770, 0o660), (0o755, 0o644), (0o700, 0o600)])
def test_the_lock_is_as_writable_as_the_directory(
    tmp_path: Path, directory: int, lock: int
) -> None:
    before = os.umask(0o022)
    try:
        jobs = tmp_path / "jobs"
        jobs.mkdir()
        jobs.chmod(directory)
        with only_job(jobs):
            pass
    finally:
        os.umask(before)
    assert (jobs / "lock").stat().st_mode & 0o777 == lock


def test_a_lock_that_was_private_is_opened_and_one_job_at_a_time_runs(tmp_path: Path) -> None:
    tmp_path.chmod(0o770)
    (tmp_path / "lock").touch(mode=0o600)
    with only_job(tmp_path):
        assert (tmp_path / "lock").stat().st_mode & 0o777 == 0o660
        with pytest.raises(BusyError), only_job(tmp_path):
            pass
