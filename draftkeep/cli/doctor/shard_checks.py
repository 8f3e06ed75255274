"""What `draftkeep doctor` asks of the place where shards lie. It writes nothing there."""

import sqlalchemy as sa
from pyarrow import fs

from draftkeep.cli.doctor.finding import Finding
from draftkeep.config import Config
from draftkeep.errors import DraftkeepError
from draftkeep.store.catalog import Catalog
from draftkeep.store.ownership import require_own
from draftkeep.store.schema import shards
from draftkeep.store.storage import Storage, open_storage

_CHECK_URL = (
    "check that shards.url (or state_dir) is the one it was written under; draftkeep catalog check"
)


def check_shards(config: Config) -> Finding:
    """Can the place be listed, is it this catalog's, and is a listed file there?

    Raises StoreError where it cannot be reached or is another catalog's.
    """
    storage = open_storage(config)
    count = len(storage.list())
    if config.shards.url and not _has_bucket(storage):
        return _wrong(f"there is no bucket for {storage.place}", "make the bucket")
    detail = f"{count} files in {storage.place}"
    try:
        catalog = Catalog.existing(config)
    except DraftkeepError:
        return Finding(
            check="shards",
            status="warn",
            detail=f"{detail}; nobody knows whose while the catalog cannot be opened",
            remedy="mend the catalog first",
        )
    if catalog is None:
        return Finding(check="shards", status="ok", detail=detail)
    try:
        require_own(catalog, storage)
        name = _listed(catalog)
        # What was replaced since it was listed may be gone.
        if name is None or storage.exists(name) or _listed(catalog) != name:
            return Finding(check="shards", status="ok", detail=detail)
    finally:
        catalog.close()
    return _wrong(f"{name} is listed and not in {storage.place}", _CHECK_URL)


def _listed(catalog: Catalog) -> str | None:
    """The shard that was listed last."""
    with catalog.read() as connection:
        return connection.scalar(sa.select(shards.c.name).order_by(shards.c.id.desc()).limit(1))


def _has_bucket(storage: Storage) -> bool:
    bucket = storage.path("").partition("/")[0]
    # A store lists nothing in a bucket that is not there, and calls it no error.
    try:
        (found,) = storage.filesystem.get_file_info([bucket])
    except OSError:
        # Who may list below the prefix need not be allowed to ask.
        return True
    return bool(found.type == fs.FileType.Directory)


def _wrong(detail: str, remedy: str) -> Finding:
    return Finding(check="shards", status="fail", detail=detail, remedy=remedy)
