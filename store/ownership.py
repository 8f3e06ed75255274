"""Whose shards are these: a mark beside the directory names the one catalog that lists them.

To any other catalog every file would be one that nothing lists, and its sweeper would remove them
all. A mistyped `catalog.url` must not do that.
"""

from pathlib import Path

import sqlalchemy as sa

from draftkeep import files
from draftkeep.errors import StoreError
from draftkeep.store.catalog import Catalog
from draftkeep.store.schema import identity, shards
from draftkeep.store.shard import SUFFIX, TEMPORARY_PREFIX


def mark_of(directory: Path) -> Path:
    """The file that names the catalog of the shards in `directory`."""
    return directory.with_name(f"{directory.name}.catalog")


def require_own(catalog: Catalog, directory: Path) -> bool:
    """Whether the shards are marked as this catalog's; StoreError where they are another's."""
    try:
        found = mark_of(directory).read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        return False
    if found != _name(catalog):
        raise StoreError(
            f"the shards in {directory} belong to another catalog than {catalog.place}; check "
            "state_dir and catalog.url. If this catalog was made to replace theirs, remove "
            f"{mark_of(directory)}"
        )
    return True


def claim(catalog: Catalog, directory: Path) -> None:
    """Mark the shards as this catalog's before any is written or removed; safe to repeat.

    Raises StoreError where they are another's, and where there are shards without a mark and
    the catalog lists none: then it is not the catalog that they were written under.
    """
    if require_own(catalog, directory):
        return
    with catalog.read() as connection:
        lists_some = connection.scalar(sa.select(shards.c.id).limit(1)) is not None
    if not lists_some and _holds_shards(directory):
        raise StoreError(
            f"{directory} holds shards and the catalog {catalog.place} lists none; check "
            "state_dir and catalog.url. If nothing of them is needed, move them away"
        )
    files.write_file(mark_of(directory), f"{_name(catalog)}\n".encode())


def _name(catalog: Catalog) -> str:
    with catalog.read() as connection:
        name: bytes = connection.execute(sa.select(identity.c.id)).scalar_one()
    return name.hex()


def _holds_shards(directory: Path) -> bool:
    finished = (path.name for path in directory.glob(f"*{SUFFIX}"))
    return any(not name.startswith(TEMPORARY_PREFIX) for name in finished)
