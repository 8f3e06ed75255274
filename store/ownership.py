"""Whose shards are these: a mark among them names the one catalog that lists them, and the place.

To any other catalog every file would be one that nothing lists, and its sweeper would remove them
all. A mistyped `catalog.url` must not do that. The place has an id of its own, which the catalog
keeps: a mistyped `shards.url` must not spread one catalog's shards over two places.
"""

import os
import re
from collections.abc import Callable
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.errors import PermanentError
from draftkeep.store.catalog import Catalog
from draftkeep.store.schema import identity, shards
from draftkeep.store.storage import Storage
from draftkeep.store.stored_file import SUFFIX, TEMPORARY_PREFIX

_TEXT = re.compile(r"([0-9a-f]+)(?: ([0-9a-f]{32}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Mark:
    """A catalog's id and a place's in hexadecimal; `place` is empty where it has none yet."""

    catalog: str
    place: str

    def __str__(self) -> str:
        return f"{self.catalog} {self.place}".strip()


def require_own(catalog: Catalog, storage: Storage) -> bool:
    """Whether the shards are marked as this catalog's.

    PermanentError where they are another's, and where this catalog keeps its shards elsewhere.
    """
    with catalog.read() as connection:
        ours = _of(connection)
    return _checked(catalog, storage, ours) is not None


def claim(
    catalog: Catalog,
    storage: Storage,
    *,
    new_place: Callable[[], bytes] = lambda: os.urandom(16),
) -> None:
    """Mark the shards as this catalog's before any is written or removed; safe to repeat.

    Of several processes with different places on an empty catalog one gets its place. Where there
    is no mark, a place that holds files that the catalog lists is taken for theirs: they were
    moved there, and the place before is refused from then on. Raises PermanentError where the
    shards are another catalog's, where there are some and the catalog lists none, and where this
    catalog keeps its shards elsewhere.
    """
    with catalog.read() as connection:
        ours = _of(connection)
    if ours.place and _checked(catalog, storage, ours) == ours:
        return
    # Under the writers' lock: of all that find no mark, or no place in the catalog, one is first.
    while not _settle(catalog, storage, new_place):
        pass


def _settle(catalog: Catalog, storage: Storage, new_place: Callable[[], bytes]) -> bool:
    """Make mark and catalog agree; False where one more transaction has to."""
    with catalog.begin() as connection:
        ours = _of(connection)
        mark = _checked(catalog, storage, ours)
        if mark is None:
            _require_free(connection, catalog, storage, ours)
            if ours.place:
                # Forgotten first: who is killed between the mark and the commit leaves a catalog
                # that takes up the mark, and not one that knows another place.
                connection.execute(sa.update(identity).values(place=None))
                return False
        place = (mark.place if mark else "") or new_place().hex()
        settled = _Mark(catalog=ours.catalog, place=place)
        if mark != settled:
            # Before the commit: a mark whose place the catalog has not noted yet is taken up.
            storage.write_mark(str(settled))
        connection.execute(sa.update(identity).values(place=bytes.fromhex(place)))
        return True


def _of(connection: Connection) -> _Mark:
    row = connection.execute(sa.select(identity.c.id, identity.c.place)).one()
    return _Mark(catalog=row.id.hex(), place=row.place.hex() if row.place else "")


def _checked(catalog: Catalog, storage: Storage, ours: _Mark) -> _Mark | None:
    """The mark that is there, if any; PermanentError where it does not fit the catalog."""
    text = storage.read_mark()
    if text is None:
        return None
    found = _TEXT.fullmatch(text)
    if found is None or found[1] != ours.catalog:
        raise PermanentError(
            f"the shards in {storage.place} belong to another catalog than {catalog.place}; check "
            "state_dir, shards.url and catalog.url. If this catalog was made to replace theirs, "
            f"remove {storage.mark_place}"
        )
    mark = _Mark(catalog=found[1], place=found[2] or "")
    if ours.place and mark.place != ours.place:
        raise _elsewhere(f"{catalog.place} keeps its shards elsewhere", storage, ours)
    return mark


def _require_free(connection: Connection, catalog: Catalog, storage: Storage, ours: _Mark) -> None:
    """PermanentError unless a place without a mark is, or may become, the catalog's."""
    listed = set(connection.scalars(sa.select(shards.c.name)))
    held = {file.name for file in storage.list()}
    if listed:
        if listed.isdisjoint(held):
            what = f"the catalog {catalog.place} lists {len(listed)} shards, and {storage.place}"
            raise _elsewhere(f"{what} holds none of them", storage, ours)
    elif ours.place:
        raise _elsewhere(f"{catalog.place} keeps its shards elsewhere", storage, ours)
    elif any(name.endswith(SUFFIX) and not name.startswith(TEMPORARY_PREFIX) for name in held):
        raise PermanentError(
            f"{storage.place} holds shards and the catalog {catalog.place} lists none; check "
            "state_dir, shards.url and catalog.url. If nothing of them is needed, move them away"
        )


def _elsewhere(what: str, storage: Storage, ours: _Mark) -> PermanentError:
    return PermanentError(
        f"{what}; check shards.url and state_dir: {storage.place} is not where they were. If it is "
        f"to be their place all the same, write the line {ours} into {storage.mark_place}"
    )
