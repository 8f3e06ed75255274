"""Check: do catalog, files and logs agree, and what of a disagreement can be mended without loss.

Safe beside everything else that runs: the catalog's part is one snapshot, and what a file seems to
lack is looked up again. Repairs are the store's own chores (sweep, rewrite, the catalog's part of
an erasure). Nothing that could still be restored is deleted: a row whose file is gone, or is
another than was listed, stays and is reported.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.errors import ConflictError, StoreError
from draftkeep.ingest.log import Log
from draftkeep.store.catalog import Catalog
from draftkeep.store.check_files import check_files
from draftkeep.store.check_rules import RuleResult, Repair, check_rules
from draftkeep.store.erasure import carry_out
from draftkeep.store.influence import clear_channels, quarantine_with_descendants
from draftkeep.store.offsets import locate
from draftkeep.store.rewriter import random_serial, rewrite_erased
from draftkeep.store.schema import drafters, tombstones
from draftkeep.store.storage import Storage
from draftkeep.store.sweeper import GRACE_S, Sweeper


def check_catalog(
    catalog: Catalog,
    storage: Storage,
    *,
    logs: Sequence[Log],
    now_s: float,
    grace_s: float = GRACE_S,
    digests: bool = True,
) -> list[RuleResult]:
    """Ask every rule; the findings say which hold. `storage` is where the shards lie.

    `logs` are those whose stored offset is compared with what the log holds. `digests` reads
    every file.
    """
    with catalog.read() as connection:
        findings = [_database(connection), *check_rules(connection, now_s)]
    findings += check_files(catalog, storage, now_s=now_s, grace_s=grace_s, digests=digests)
    return [*findings, _logs(catalog, logs)]


def repair_catalog(
    catalog: Catalog,
    storage: Storage,
    findings: Iterable[RuleResult],
    *,
    now_s: float,
    grace_s: float = GRACE_S,
) -> None:
    """Do the chores that mend what `findings` say; check again to see what is left."""
    chores = {finding.repair for finding in findings if finding.broken}
    if Repair.ERASURE in chores:
        _finish_erasures(catalog, now_s)
    if Repair.REWRITE in chores:
        # Another process replaced a shard, or its file is gone: the next check says which.
        with suppress(ConflictError):
            rewrite_erased(catalog, storage, now_s=now_s, new_serial=random_serial)
    if Repair.SWEEP in chores:
        Sweeper(catalog, storage, clock=lambda: now_s, grace_s=grace_s).run_once()


def _finish_erasures(catalog: Catalog, now_s: float) -> None:
    """What every erasure left in the catalog, found again from its tombstones."""
    with catalog.begin() as connection:
        for erasure_id in set(connection.scalars(sa.select(tombstones.c.erasure))):
            carry_out(connection, erasure_id, now_s)
        quarantined = sa.select(drafters.c.digest).where(drafters.c.status == "quarantined")
        tainted, _ = quarantine_with_descendants(connection, set(connection.scalars(quarantined)))
        clear_channels(connection, tainted, now_s)


def _database(connection: Connection) -> RuleResult:
    """SQLite's own check of its file. PostgreSQL checks pages as it reads them."""
    broken: list[str] = []
    if connection.dialect.name == "sqlite":
        broken = list(connection.exec_driver_sql("PRAGMA integrity_check(3)").scalars())
        if broken == ["ok"]:
            broken = []
    return RuleResult(
        rule="the database is sound",
        broken=len(broken),
        examples=tuple(broken),
        remedy="restore it from a backup",
        repair=Repair.NONE,
    )


def _logs(catalog: Catalog, logs: Sequence[Log]) -> RuleResult:
    broken = []
    for log in logs:
        try:
            locate(catalog, log)
        except StoreError as error:
            broken.append(str(error))
    return RuleResult(
        rule="no stored offset lies beyond its log",
        broken=len(broken),
        examples=tuple(broken),
        remedy="find out why the log is another before anything is compacted",
        repair=Repair.NONE,
    )
