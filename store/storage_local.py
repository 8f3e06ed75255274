"""Shards in a directory."""

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
from pyarrow import fs

from draftkeep import files
from draftkeep.errors import ConflictError, ShardError, StoreError
from draftkeep.store.stored_file import MARK, TEMPORARY_PREFIX, StoredFile, is_of_storage


class LocalStorage:
    """A directory, made with its first file. A file that is open may be removed; it reads on.

    Writing goes to a temporary name; the file is fsynced, renamed, and its directory fsynced.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mark = directory / MARK

    @property
    def place(self) -> str:
        """The directory."""
        return str(self._directory)

    @property
    def mark_place(self) -> str:
        """The mark's file, among the shards."""
        return str(self._mark)

    @property
    def filesystem(self) -> fs.FileSystem:
        """The machine's own."""
        return fs.LocalFileSystem()

    def path(self, name: str) -> str:
        """Absolute."""
        return str((self._directory / name).absolute())

    @contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        """A stream to a temporary file that becomes `name` on a clean exit."""
        temporary = self._directory / (TEMPORARY_PREFIX + name)
        with self._explained(name):
            self._make_directory()
            try:
                with temporary.open("wb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                self._rename(temporary, name)
            except BaseException:
                with suppress(OSError):
                    temporary.unlink()
                raise
            files.sync(self._directory)

    def _make_directory(self) -> None:
        if not self._directory.is_dir():
            self._directory.mkdir(parents=True, exist_ok=True)
            files.sync(self._directory.parent)

    def _rename(self, temporary: Path, name: str) -> None:
        try:
            temporary.rename(self._directory / name)
        except FileNotFoundError:
            raise ConflictError(
                f"{name} was swept while it was written; start again, and check the clocks of the "
                "machines that compact"
            ) from None

    @contextmanager
    def open(self, name: str) -> Iterator[pa.NativeFile]:
        """The open file; removing it does not disturb who reads it."""
        # What one file suffers, the others need not.
        with self._explained(name, ShardError), pa.OSFile(self.path(name)) as file:
            yield file

    def exists(self, name: str) -> bool:
        """Whether the file is there."""
        with self._explained(name):
            return (self._directory / name).exists()

    def list(self) -> list[StoredFile]:
        """Every file but the mark; temporary ones begin with `TEMPORARY_PREFIX`."""
        found = []
        with self._explained("the list of files"):
            for path in _entries(self._directory):
                try:
                    facts = path.stat()
                except FileNotFoundError:
                    continue
                # The mark has a longer name while it is written.
                if stat.S_ISREG(facts.st_mode) and MARK not in path.name:
                    found.append(
                        StoredFile(
                            name=path.name, size_bytes=facts.st_size, modified_s=facts.st_mtime
                        )
                    )
        return found

    def remove(self, names: Iterable[str]) -> None:
        """Unlink, then fsync the directory once."""
        unlinked = False
        for name in names:
            with self._explained(name):
                (self._directory / name).unlink(missing_ok=True)
            unlinked = True
        if unlinked and self._directory.is_dir():
            with self._explained("what was removed"):
                files.sync(self._directory)

    def read_mark(self) -> str | None:
        """The mark's text."""
        try:
            with self._explained("the mark"):
                return self._mark.read_text(encoding="utf-8", errors="replace").strip()
        except FileNotFoundError:
            return None

    def write_mark(self, text: str) -> None:
        """Replace the mark's file."""
        with self._explained("the mark"):
            self._make_directory()
            files.write_file(self._mark, f"{text}\n".encode())

    @contextmanager
    def _explained(self, name: str, kind: type[StoreError] = StoreError) -> Iterator[None]:
        """Errors of the disk as `kind`; FileNotFoundError and all others are left as they are."""
        try:
            yield
        except FileNotFoundError:
            raise
        except OSError as error:
            if not is_of_storage(error):
                raise
            reason = os.strerror(error.errno or 0)
            raise kind(
                f"{self.place} did not do what was asked for {name} ({reason}); check that the "
                "disk is sound and has room, and that this user may read and write there"
            ) from None


def _entries(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except FileNotFoundError:
        return []
