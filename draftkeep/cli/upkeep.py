"""Upkeep: what one process of a deployment does for all. Bytes go that are to go, files are merged.

Harmless where another process does the same: whoever is second leaves the rest to the next time.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from draftkeep.config import Config
from draftkeep.distill.resume import drop_contaminated
from draftkeep.errors import ConflictError, DraftkeepError, StoreError
from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.store.catalog import Catalog
from draftkeep.store.log_deletion_round import delete_owed_records
from draftkeep.store.ownership import claim
from draftkeep.store.rewriter import merge, random_serial, rewrite_erased
from draftkeep.store.storage import Storage
from draftkeep.store.sweeper import Sweeper

# Small enough to rewrite quickly after an erasure, large enough for good compression.
TARGET_SHARD_BYTES = 128 * 1024**2


@dataclass(slots=True, kw_only=True)
class UpkeepReport:
    """The counts of what was done, and what failed, which kept no other chore from being done."""

    counts: dict[str, int] = field(default_factory=dict)
    failures: list[StoreError] = field(default_factory=list)


def do_upkeep(
    config: Config,
    catalog: Catalog,
    storage: Storage,
    *,
    clock: Callable[[], float],
    enough: Callable[[], bool] = lambda: False,
    stopped: Callable[[], bool] = lambda: False,
) -> UpkeepReport:
    """Sweep what expired, rewrite erased rows, delete in the topic, drop checkpoints, merge.

    Deadlines come first, then erasures; merging, which frees nobody's data, comes last. Shards that
    are not this catalog's are left alone. `enough` ends rewriting and merging between two shards;
    so does `stopped`, after which no chore is begun either: each may wait for what does not answer.
    """
    report = UpkeepReport()

    def attempt(what: str, chore: Callable[[], dict[str, int]]) -> bool:
        return not stopped() and _try(report, what, chore)

    def ended() -> bool:
        return enough() or stopped()

    ours = attempt("claiming the shards", lambda: _claim(catalog, storage))

    def rewrite() -> dict[str, int]:
        report = rewrite_erased(
            catalog, storage, now_s=clock(), new_serial=random_serial, stopped=ended
        )
        return {"rows_rewritten_away": report.rows_removed, "shards_damaged": report.damaged}

    def delete_in_topic() -> dict[str, int]:
        return _delete_in_topic(config, catalog, now_s=clock()) if config.kafka.servers else {}

    def drop_checkpoints() -> dict[str, int]:
        return {"checkpoints_removed": drop_contaminated(catalog, config.state_dir / "jobs")}

    def join() -> dict[str, int]:
        merged = merge(
            catalog,
            storage,
            target_bytes=TARGET_SHARD_BYTES,
            now_s=clock(),
            new_serial=random_serial,
            stopped=ended,
        )
        return {"shards_damaged": merged.damaged}

    if ours:
        attempt("sweeping", lambda: _sweep(Sweeper(catalog, storage, clock=clock)))
        attempt("rewriting erased rows", rewrite)
    attempt("deleting in the topic", delete_in_topic)
    attempt("removing checkpoints", drop_checkpoints)
    if ours:
        attempt("merging", join)
    return report


def _try(report: UpkeepReport, what: str, chore: Callable[[], dict[str, int]]) -> bool:
    """Do it and add its counts, or note why it failed, whatever part of the world it was."""
    try:
        done = chore()
    except ConflictError:
        # Another process replaced a shard first; it or the next time does the rest.
        return False
    except StoreError as error:
        report.failures.append(error)
        return False
    except Exception as error:
        # A fault of ours or of a library, too: whoever waits for the others is not to pay for it.
        report.failures.append(StoreError(f"{what} failed: {_reason(error)}"))
        return False
    for name, count in done.items():
        report.counts[name] = report.counts.get(name, 0) + count
    return True


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.strerror or type(error).__name__}: {error.filename or 'no path given'}"
    # Of any other error the type alone: its words may quote values.
    return str(error) if isinstance(error, DraftkeepError) else type(error).__name__


def _claim(catalog: Catalog, storage: Storage) -> dict[str, int]:
    claim(catalog, storage)
    return {}


def _sweep(sweeper: Sweeper) -> dict[str, int]:
    swept = sweeper.run_once()
    return {
        "shards_expired": swept.shards,
        "shards_missing": len(swept.missing),
        "orphans_removed": swept.orphans,
    }


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
