"""What one process of a deployment does for all: bytes that are to go, and files that are small."""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from draftkeep.distill.resume import drop_contaminated
from draftkeep.errors import ConflictError
from draftkeep.store.catalog import Catalog
from draftkeep.store.rewriter import RewriteReport, merge, random_serial, rewrite_erased
from draftkeep.store.storage import Storage
from draftkeep.store.sweeper import Sweeper

# Small enough to rewrite quickly after an erasure, large enough for good compression.
TARGET_SHARD_BYTES = 128 * 1024**2


def keep_house(
    catalog: Catalog, storage: Storage, state_dir: Path, *, clock: Callable[[], float]
) -> dict[str, int]:
    """Rewrite erased rows, merge small shards, sweep shards and checkpoints; returns the counts.

    Harmless where another process does the same: whoever is second leaves the rest to the next
    time. Raises StoreError where catalog or storage cannot be used.
    """
    rewritten = RewriteReport()
    # A rival replaced a shard first.
    with suppress(ConflictError):
        rewritten = rewrite_erased(catalog, storage, now_s=clock(), new_serial=random_serial)
        merge(
            catalog,
            storage,
            target_bytes=TARGET_SHARD_BYTES,
            now_s=clock(),
            new_serial=random_serial,
        )
    swept = Sweeper(catalog, storage, clock=clock).run_once()
    return {
        "rows_rewritten_away": rewritten.rows_removed,
        "shards_expired": swept.shards,
        "orphans_removed": swept.orphans,
        "checkpoints_removed": drop_contaminated(catalog, state_dir / "jobs"),
    }
