"""One pass of everything that moves or removes bytes, and the loop around it. Needs no key."""

import time
from typing import Any

from rich.console import Console

from draftkeep.config import Config
from draftkeep.distill.resume import drop_contaminated
from draftkeep.errors import ConfigError
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.store.anchors import ISSUER, read_anchor
from draftkeep.store.catalog import Catalog
from draftkeep.store.compactor import Compactor, CompactReport
from draftkeep.store.storage import open_storage
from draftkeep.store.sweeper import Sweeper

# Small enough to rewrite quickly after an erasure, large enough for good compression.
TARGET_SHARD_BYTES = 128 * 1024**2


def compact_once(config: Config) -> dict[str, Any]:
    """Read the log to its end, rewrite erased rows, merge, sweep shards and checkpoints."""
    issuer_public = read_anchor(config.state_dir, ISSUER)
    catalog = Catalog.configured(config)
    log = SqliteLog.open_reader(config.state_dir / "log" / "traces")
    storage = open_storage(config)
    try:
        compactor = Compactor(
            log,
            catalog,
            storage,
            clock=time.time,
            issuer_public=issuer_public,
        )
        reports = [compactor.run_once()]
        while reports[-1].read:
            reports.append(compactor.run_once())
        rewritten = compactor.rewrite_erased()
        compactor.merge(TARGET_SHARD_BYTES)
        swept = Sweeper(catalog, storage, clock=time.time).run_once()
        checkpoints = drop_contaminated(catalog, config.state_dir / "jobs")
    finally:
        log.close()
        catalog.close()
    return {
        **_totals(reports),
        "rows_rewritten_away": rewritten.rows_removed,
        "shards_expired": swept.shards,
        "orphans_removed": swept.orphans,
        "checkpoints_removed": checkpoints,
    }


def compact_forever(config: Config, *, every_s: float) -> None:
    """Compact until interrupted, one line of counts whenever there was something to do."""
    console = Console()
    waiting = False
    while True:
        try:
            report = compact_once(config)
        except ConfigError as error:
            # A compactor may be started before the node that makes what it reads.
            if not waiting:
                console.print(f"waiting: {error}", markup=False)
            waiting = True
        else:
            if any(report.values()):
                console.print_json(data=report, indent=None)
        time.sleep(every_s)


def _totals(reports: list[CompactReport]) -> dict[str, Any]:
    return {
        "read": sum(report.read for report in reports),
        "stored": sum(report.stored for report in reports),
        "shards": sum(len(report.shards) for report in reports),
        "duplicates": sum(report.duplicates for report in reports),
        "refused": sum(sum(report.counted.values()) for report in reports),
        "dead_letters": sum(sum(report.dead.values()) for report in reports),
        "gaps": sum(len(report.gaps) for report in reports),
    }
