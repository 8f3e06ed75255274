"""Files and directories that appear whole or not at all, and stay after a power cut."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def new_directory(final: Path) -> Iterator[Path]:
    """Give an empty sibling of `final` to fill; on a clean exit it becomes `final`.

    Everything in it is fsynced before the rename and the parent after it, so a crash leaves
    `final` absent or complete. Where `final` exists by then (another process made it first), the
    sibling is dropped and `final` stays as it is. An error inside the block leaves nothing.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        yield building
        for path in building.iterdir():
            sync(path)
        # mkdtemp makes it private; a published directory is readable like its neighbours.
        building.chmod(0o755)
        sync(building)
        _move(building, final)
        sync(final.parent)
    finally:
        shutil.rmtree(building, ignore_errors=True)


def write_file(path: Path, data: bytes) -> None:
    """Replace the file with `data`, durably: a reader sees the old bytes or the new ones."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """fsync a file, or a directory so that creations, renames and unlinks in it are durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _move(building: Path, final: Path) -> None:
    try:
        building.rename(final)
    except OSError:
        # rename refuses a non-empty target: another process won the race with the same content.
        if not final.is_dir():
            raise
