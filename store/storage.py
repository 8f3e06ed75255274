"""Storage: where shards lie, a directory or a bucket.

A name is used once: a file is written, read, and removed, and never written again. What counts is
for the catalog to say, so a file that nothing lists harms nobody.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import BinaryIO, Protocol

import pyarrow as pa
from pyarrow import fs

from draftkeep.config import Config
from draftkeep.errors import ConfigError
from draftkeep.store.storage_local import LocalStorage
from draftkeep.store.storage_objects import ObjectStorage
from draftkeep.store.stored_file import StoredFile


class Storage(Protocol):
    """Files by name, for several threads and processes at once.

    Every call but `place` and `path` may raise StoreError where the storage cannot be reached or
    refuses; messages hold no credentials.
    """

    @property
    def place(self) -> str:
        """Where this is, for messages."""
        ...

    @property
    def mark_place(self) -> str:
        """Where the mark is, for messages."""
        ...

    @property
    def filesystem(self) -> fs.FileSystem:
        """What PyArrow reads the files through, at `path(name)`."""
        ...

    def path(self, name: str) -> str:
        """The file's path in `filesystem`."""
        ...

    def create(self, name: str) -> AbstractContextManager[BinaryIO]:
        """A stream to write a file with. The file is there, whole and durable, after a clean exit.

        Until then, and after an error in the block, no file of that name is in use: readers
        learn names from the catalog. An error leaves none behind. ConflictError where a sweeper
        took it for an orphan meanwhile.
        """
        ...

    def open(self, name: str) -> AbstractContextManager[pa.NativeFile]:
        """A file for reading anywhere in it.

        FileNotFoundError where it is not there, and from a read in the block where it was removed
        meanwhile and the storage does not keep it for those who have it open.
        """
        ...

    def exists(self, name: str) -> bool:
        """Whether the file is there."""
        ...

    def list(self) -> list[StoredFile]:
        """Every file but the mark, unfinished ones included where they can be seen."""
        ...

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, durably; those that are not there are passed over."""
        ...

    def read_mark(self) -> str | None:
        """What `write_mark` wrote last; None where it never did."""
        ...

    def write_mark(self, text: str) -> None:
        """Say whose files these are, durably."""
        ...


def open_storage(config: Config) -> Storage:
    """Where a configuration's shards lie. Nothing is read or written yet.

    ConfigError for an endpoint or region without a bucket.
    """
    shards = config.shards
    if shards.url:
        return ObjectStorage(shards.url, endpoint=shards.endpoint, region=shards.region)
    if shards.endpoint or shards.region:
        raise ConfigError(
            "shards.endpoint or shards.region is set without shards.url; set "
            "shards.url = s3://BUCKET/PREFIX, or remove them to keep shards in state_dir"
        )
    return LocalStorage(config.state_dir / "shards")
