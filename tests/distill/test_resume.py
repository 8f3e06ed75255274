"""What stopped jobs left on disk: it goes where it has to, and only what is gone counts as gone."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from draftkeep.distill.resume import drop_contaminated, resumable
from draftkeep.errors import StoreError
from draftkeep.store.catalog import Catalog
from draftkeep.store.jobs import start_job
from draftkeep.store.schema import jobs

SCOPE = "tenant:acme"


@pytest.fixture
def catalog(tmp_path: Path) -> Iterator[Catalog]:
    made = Catalog.open(tmp_path / "catalog.db")
    for job_id in ("a", "b", "c"):
        start_job(made, job_id, scope=SCOPE, parent=None, inputs=(), at_s=0.0)
    with made.begin() as connection:
        connection.execute(sa.update(jobs).where(jobs.c.id != "c").values(contaminated=True))
    yield made
    made.close()


@pytest.fixture
def jobs_dir(tmp_path: Path) -> Path:
    for job_id in ("a", "b", "c"):
        checkpoint = tmp_path / "jobs" / job_id / "checkpoint.safetensors"
        checkpoint.parent.mkdir(parents=True)
        checkpoint.write_bytes(job_id.encode())
    return tmp_path / "jobs"


def checkpoints(jobs_dir: Path) -> list[str]:
    return sorted(path.read_text() for path in jobs_dir.glob("*/checkpoint.safetensors"))


def move_away(jobs_dir: Path, job_id: str) -> Path:
    """The directory on another disk, and a link in its place, which is not followed."""
    elsewhere = jobs_dir.parent / "elsewhere"
    shutil.move(jobs_dir / job_id, elsewhere)
    (jobs_dir / job_id).symlink_to(elsewhere)
    return elsewhere


def test_only_what_is_gone_counts_as_removed(catalog: Catalog, jobs_dir: Path) -> None:
    elsewhere = move_away(jobs_dir, "a")
    for _ in range(2):
        with pytest.raises(StoreError, match="cannot be removed"):
            drop_contaminated(catalog, jobs_dir)
        # The others go all the same, and what is clean stays.
        assert checkpoints(jobs_dir) == ["a", "c"]
    (jobs_dir / "a").unlink()
    shutil.move(elsewhere, jobs_dir / "a")
    assert drop_contaminated(catalog, jobs_dir) == 1
    assert checkpoints(jobs_dir) == ["c"]
    assert drop_contaminated(catalog, jobs_dir) == 0


def test_a_checkpoint_that_cannot_be_unlinked_is_not_gone(
    catalog: Catalog, jobs_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = os.unlink

    def refused(path: Any, **options: Any) -> None:
        if str(path).endswith("checkpoint.safetensors"):
            raise PermissionError(1, "Operation not permitted", path)
        unlink(path, **options)

    with monkeypatch.context() as failing:
        failing.setattr(os, "unlink", refused)
        with pytest.raises(StoreError, match="Operation not permitted"):
            drop_contaminated(catalog, jobs_dir)
    assert checkpoints(jobs_dir) == ["a", "b", "c"]
    assert drop_contaminated(catalog, jobs_dir) == 2


def test_a_job_whose_checkpoint_stays_has_not_ended(catalog: Catalog, jobs_dir: Path) -> None:
    elsewhere = move_away(jobs_dir, "b")
    with pytest.raises(StoreError, match="cannot be removed"):
        resumable(catalog, jobs_dir, scope=SCOPE, base="base", at_s=1.0)
    with catalog.read() as connection:
        assert set(connection.scalars(sa.select(jobs.c.state))) == {"running"}
    (jobs_dir / "b").unlink()
    elsewhere.rename(jobs_dir / "b")
    assert resumable(catalog, jobs_dir, scope=SCOPE, base="base", at_s=1.0) is None
    assert checkpoints(jobs_dir) == []
    with catalog.read() as connection:
        assert set(connection.scalars(sa.select(jobs.c.state))) == {"failed"}
