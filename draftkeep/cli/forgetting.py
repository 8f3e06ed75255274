"""Forgetting how far a log was read, from the command line."""

from dataclasses import astuple, fields

from rich.table import Table

from draftkeep.cli.auditing import open_existing
from draftkeep.cli.tables import plain_table
from draftkeep.config import Config
from draftkeep.errors import InputError
from draftkeep.store.offsets import StoredOffset, forget_log, stored_offsets


def forget(config: Config, name: str, *, yes: bool) -> Table:
    """The stored offsets of a topic, one row a partition; with `yes` they are gone afterwards.

    Raises InputError where the catalog has none of that name.
    """
    catalog = open_existing(config)
    try:
        found = stored_offsets(catalog, name)
        if not found:
            raise InputError(
                f"the catalog has no offsets of a log named {name}; the audit view `offsets` has "
                "the names"
            )
        if yes:
            forget_log(catalog, name)
    finally:
        catalog.close()
    columns = (field.name for field in fields(StoredOffset))
    return plain_table(columns, (astuple(offset) for offset in found))
