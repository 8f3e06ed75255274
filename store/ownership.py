"""Whose shards are these: a mark beside them names the one catalog that lists them.

To any other catalog every file would be one that nothing lists, and its sweeper would remove them
all. A mistyped `catalog.url` must not do that.
"""

import sqlalchemy as sa

from draftkeep.errors import StoreError
from draftkeep.store.catalog import Catalog
from draftkeep.store.schema import identity, shards
from draftkeep.store.storage import Storage
from draftkeep.store.stored_file import SUFFIX, TEMPORARY_PREFIX


def require_own(catalog: Catalog, storage: Storage) -> bool:
    """Whether the shards are marked as this catalog's; StoreError where they are another's."""
    found = storage.read_mark()
    if found is None:
        return False
    if found != _name(catalog):
        raise StoreError(
            f"the shards in {storage.place} belong to another catalog than {catalog.place}; check "
            "state_dir, shards.url and catalog.url. If this catalog was made to replace theirs, "
            f"remove {storage.mark_place}"
        )
    return True


def claim(catalog: Catalog, storage: Storage) -> None:
    """Mark the shards as this catalog's before any is written or removed; safe to repeat.

    Raises StoreError where they are another's, and where there are shards without a mark and
    the catalog lists none: then it is not the catalog that they were written under.
    """
    if require_own(catalog, storage):
        return
    with catalog.read() as connection:
        lists_some = connection.scalar(sa.select(shards.c.id).limit(1)) is not None
    if not lists_some and _holds_shards(storage):
        raise StoreError(
            f"{storage.place} holds shards and the catalog {catalog.place} lists none; check "
            "state_dir, shards.url and catalog.url. If nothing of them is needed, move them away"
        )
    storage.write_mark(_name(catalog))


def _name(catalog: Catalog) -> str:
    with catalog.read() as connection:
        name: bytes = connection.execute(sa.select(identity.c.id)).scalar_one()
    return name.hex()


def _holds_shards(storage: Storage) -> bool:
    names = (file.name for file in storage.list())
    return any(name.endswith(SUFFIX) and not name.startswith(TEMPORARY_PREFIX) for name in names)
