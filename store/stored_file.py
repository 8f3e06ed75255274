"""What a shard's file is called, and what a storage tells about a file."""

from dataclasses import dataclass

SUFFIX = ".parquet"
TEMPORARY_PREFIX = ".tmp-"
# The mark among the files: it goes where they go, and is missing where they are.
MARK = "draftkeep.catalog"
# How PyArrow's errors of an object store begin.
AWS_ERROR = "AWS Error "


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """A file as a storage lists it. `modified_s` is Unix seconds by the storage's own clock."""

    name: str
    size_bytes: int
    modified_s: float


def is_of_storage(error: Exception) -> bool:
    """Whether the storage failed while PyArrow read a file, and not what the file's bytes say."""
    return isinstance(error, OSError) and (error.errno is not None or AWS_ERROR in str(error))
