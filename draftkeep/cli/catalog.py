"""`draftkeep catalog`: check it against shards and log, or forget how far a log was read."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import astuple, dataclass, fields
from typing import TYPE_CHECKING, Annotated

import typer

from draftkeep.cli.options import ConfigOption
from draftkeep.cli.tables import plain_table, table_console
from draftkeep.config import Config, load_config
from draftkeep.errors import InputError

if TYPE_CHECKING:
    from draftkeep.store.check_rules import RuleResult

catalog_app = typer.Typer(help="Look after the catalog.", no_args_is_help=True)


@catalog_app.command("check")
def check(
    config: ConfigOption = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Mend what can be mended without a loss.")
    ] = False,
    sizes_only: Annotated[
        bool, typer.Option("--sizes-only", help="Do not read the files to compare digests.")
    ] = False,
) -> None:
    """Prove that catalog, shards and log agree. Exit status 1 where they do not."""
    report = _check_store(load_config(config), repair=repair, digests=not sizes_only)
    columns = ("rule", "status", "broken", "for example", "remedy")
    table_console().print(plain_table(columns, _rows(report)))
    if any(result.broken for result in report.left):
        raise typer.Exit(1)


@catalog_app.command("forget-log")
def forget_log(
    name: Annotated[str, typer.Argument(help="The topic's name, or its id.")],
    config: ConfigOption = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without, only show it.")] = False,
) -> None:
    """Forget how far a log was read, so that it is read from its start. Nothing else is lost.

    For a topic that was deleted and made again, or restored from an older copy.
    """
    from draftkeep.store import offsets
    from draftkeep.store.catalog import Catalog

    catalog = Catalog.configured(load_config(config), create=False)
    try:
        found = offsets.stored_offsets(catalog, name)
        if not found:
            raise InputError(
                f"the catalog has no offsets of a log named {name}; the audit view `offsets` has "
                "the names"
            )
        topics = sorted({offset.topic_id for offset in found})
        if yes and len(topics) > 1:
            raise InputError(
                f"{len(topics)} logs are named {name}: {', '.join(topics)}; nothing was "
                "forgotten. Give the id of the one that is meant; without --yes their clusters "
                "are shown"
            )
        if yes:
            offsets.forget_log(catalog, name)
    finally:
        catalog.close()
    columns = (field.name for field in fields(offsets.StoredOffset))
    console = table_console()
    console.print(plain_table(columns, (astuple(offset) for offset in found)))
    if not yes:
        console.print("Nothing was forgotten; repeat it with --yes to forget these offsets.")
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """What was found first, and what was left after repairs (the same where none were asked)."""

    found: "list[RuleResult]"
    left: "list[RuleResult]"


def _check_store(config: Config, *, repair: bool, digests: bool) -> _Report:
    """Check the configured catalog against its files and the embedded log; mend it if asked."""
    from draftkeep.ingest.sqlite_log import SqliteLog
    from draftkeep.store.catalog import Catalog
    from draftkeep.store.check import check_catalog, repair_catalog
    from draftkeep.store.ownership import require_own
    from draftkeep.store.storage import open_storage

    storage = open_storage(config)
    with ExitStack() as stack:
        catalog = Catalog.configured(config, create=False, migrate=repair)
        stack.callback(catalog.close)
        require_own(catalog, storage)
        logs = [SqliteLog.open_reader(config.log_path)] if config.log_path.exists() else []

        def results() -> "list[RuleResult]":
            return check_catalog(catalog, storage, logs=logs, now_s=time.time(), digests=digests)

        found = left = results()
        if repair and any(result.broken for result in found):
            repair_catalog(catalog, storage, found, now_s=time.time())
            left = results()
    return _Report(found=found, left=left)


def _rows(report: _Report) -> Iterator[tuple[object, ...]]:
    """One row a rule, with how much broke it and what to do about what is left."""
    for before, after in zip(report.found, report.left, strict=True):
        status = "broken" if after.broken else "repaired" if before.broken else "ok"
        shown = after if after.broken else before
        remedy = after.remedy if after.broken else ""
        yield after.rule, status, shown.broken or None, ", ".join(shown.examples), remedy
