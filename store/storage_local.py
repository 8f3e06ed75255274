"""Shards in a directory."""

import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
from pyarrow import fs

from draftkeep import files
from draftkeep.store.stored_file import TEMPORARY_PREFIX, StoredFile


class LocalStorage:
    """A directory, made with its first file. A file that is open may be removed; it reads on.

    Writing goes to a temporary name; the file is fsynced, renamed, and its directory fsynced.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._mark = directory.with_name(f"{directory.name}.catalog")

    @property
    def place(self) -> str:
        """The directory."""
        return str(self._directory)

    @property
    def mark_place(self) -> str:
        """The mark's file, beside the directory."""
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
        if not self._directory.is_dir():
            self._directory.mkdir(parents=True, exist_ok=True)
            files.sync(self._directory.parent)
        temporary = self._directory / (TEMPORARY_PREFIX + name)
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.rename(self._directory / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        files.sync(self._directory)

    @contextmanager
    def open(self, name: str) -> Iterator[pa.NativeFile]:
        """The open file; removing it does not disturb who reads it."""
        with pa.OSFile(self.path(name)) as file:
            yield file

    def exists(self, name: str) -> bool:
        """Whether the file is there."""
        return (self._directory / name).exists()

    def list(self) -> list[StoredFile]:
        """Every file of the directory; temporary ones begin with `TEMPORARY_PREFIX`."""
        found = []
        for path in self._directory.glob("*"):
            try:
                facts = path.stat()
            except FileNotFoundError:
                continue
            if stat.S_ISREG(facts.st_mode):
                found.append(
                    StoredFile(name=path.name, size_bytes=facts.st_size, modified_s=facts.st_mtime)
                )
        return found

    def remove(self, names: Iterable[str]) -> None:
        """Unlink, then fsync the directory once."""
        unlinked = False
        for name in names:
            (self._directory / name).unlink(missing_ok=True)
            unlinked = True
        if unlinked and self._directory.is_dir():
            files.sync(self._directory)

    def read_mark(self) -> str | None:
        """The mark's text."""
        try:
            return self._mark.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return None

    def write_mark(self, text: str) -> None:
        """Replace the mark's file."""
        files.write_file(self._mark, f"{text}\n".encode())
