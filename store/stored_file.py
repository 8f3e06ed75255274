"""What a shard's file is called, and what a storage tells about a file."""

from dataclasses import dataclass

SUFFIX = ".parquet"
TEMPORARY_PREFIX = ".tmp-"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file as a storage lists it. `modified_s` is Unix seconds by the storage's own clock."""

    name: str
    size_bytes: int
    modified_s: float
