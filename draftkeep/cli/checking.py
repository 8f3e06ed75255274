"""Checking the store from the command line: one line a rule, and what was mended."""

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

from rich.table import Table

from draftkeep.cli.auditing import open_existing
from draftkeep.cli.tables import plain_table
from draftkeep.config import Config
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.store.check import check_catalog, repair_catalog
from draftkeep.store.check_rules import RuleResult
from draftkeep.store.ownership import require_own
from draftkeep.store.storage import open_storage


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What was found first, and what was left after repairs (the same where none were asked)."""

    found: list[RuleResult]
    left: list[RuleResult]

    @property
    def sound(self) -> bool:
        """Whether every rule holds in the end."""
        return not any(finding.broken for finding in self.left)


def check_store(config: Config, *, repair: bool, digests: bool) -> CheckReport:
    """Check the configured catalog against its files and the embedded log; mend it if asked."""
    storage = open_storage(config)
    log = config.log_path
    with ExitStack() as stack:
        catalog = open_existing(config)
        stack.callback(catalog.close)
        require_own(catalog, storage)
        logs = [SqliteLog.open_reader(log)] if log.exists() else []

        def check() -> list[RuleResult]:
            return check_catalog(catalog, storage, logs=logs, now_s=time.time(), digests=digests)

        found = left = check()
        if repair and any(finding.broken for finding in found):
            repair_catalog(catalog, storage, found, now_s=time.time())
            left = check()
    return CheckReport(found=found, left=left)


def report_table(report: CheckReport) -> Table:
    """One row a rule, with how much broke it and what to do about what is left."""
    columns = ("rule", "status", "broken", "for example", "remedy")
    return plain_table(columns, _rows(report.found, report.left))


def _rows(found: Iterable[RuleResult], left: Iterable[RuleResult]) -> Iterator[tuple[object, ...]]:
    for before, after in zip(found, left, strict=True):
        status = "broken" if after.broken else "repaired" if before.broken else "ok"
        shown = after if after.broken else before
        remedy = after.remedy if after.broken else ""
        yield after.rule, status, shown.broken or None, ", ".join(shown.examples), remedy
