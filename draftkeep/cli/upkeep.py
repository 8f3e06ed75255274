"""Upkeep: what one process of a deployment does for all. Bytes go that are to go, files are merged.

Harmless where another process does the same: whoever is second leaves the rest to the next time.
"""

from collections.abc import Callable
from contextlib import suppress

from draftkeep.config import Config
from draftkeep.distill.resume import drop_contaminated
from draftkeep.errors import ConflictError
from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.store.catalog import Catalog
from draftkeep.store.log_deletion_round import delete_owed_records
from draftkeep.store.rewriter import RewriteReport, merge, random_serial, rewrite_erased
from draftkeep.store.storage import Storage
from draftkeep.store.sweeper import Sweeper

# Small enough to rewrite quickly after an erasure, large enough for good compression.
TARGET_SHARD_BYTES = 128 * 1024**2


def do_upkeep(
    config: Config, catalog: Catalog, storage: Storage, *, clock: Callable[[], float]
) -> dict[str, int]:
    """Rewrite erased rows, merge small shards, sweep shards and checkpoints, delete in the topic.

    Returns the counts. Raises StoreError where catalog, storage or brokers cannot be used.
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
    done = {
        "rows_rewritten_away": rewritten.rows_removed,
        "shards_expired": swept.shards,
        "shards_missing": len(swept.missing),
        "orphans_removed": swept.orphans,
        "checkpoints_removed": drop_contaminated(catalog, config.state_dir / "jobs"),
    }
    if config.kafka.servers:
        done |= _delete_in_topic(config, catalog, now_s=clock())
    return done


def _delete_in_topic(config: Config, catalog: Catalog, *, now_s: float) -> dict[str, int]:
    report = delete_owed_records(
        catalog,
        KafkaAccess.configured(config.kafka),
        config.kafka.topic,
        policy=config.kafka.delete_records,
        now_s=now_s,
    )
    return {
        "log_deletions": report.deleted,
        "log_deletions_undone": report.undone,
        "log_deletions_settled": report.verified + report.topic_gone,
        "log_deletions_owed": report.owed,
    }
