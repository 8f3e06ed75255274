"""Migrations: how a catalog of an earlier version becomes one of this version. Forward only.

A migration is a module `vNNNN_name` with a function `upgrade(op)`, where `op` is Alembic's
`Operations`. Numbers go up by one from 1; the catalog keeps the last one it went through in
`schema_version`, so every version of draftkeep refuses what a later one wrote. A migration that was
released is never changed, and says everything itself: `schema.py` moves on, it does not.
"""

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.errors import StoreError

if TYPE_CHECKING:
    from alembic.operations import Operations

Migration = Callable[["Operations"], None]
_VERSION = sa.table("schema_version", sa.column("version", sa.Integer))


def version_of(connection: Connection) -> int:
    """The last migration this catalog went through; 0 for an empty database."""
    if not sa.inspect(connection).has_table(_VERSION.name):
        return 0
    return int(connection.scalar(sa.select(_VERSION.c.version)) or 0)


def known() -> dict[int, Migration]:
    """Every migration of this version of draftkeep, by number, in order."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        number = int(module.name.removeprefix("v").partition("_")[0])
        found[number] = importlib.import_module(f"{__name__}.{module.name}").upgrade
    return dict(sorted(found.items()))


def upgrade(connection: Connection, migrations: Mapping[int, Migration] | None = None) -> int:
    """Run what the catalog has not been through, in order; returns its version.

    Call it in a transaction that holds the writers' lock: it asks for the version again, since
    another process may have been first. A catalog of a later version is left as it is.
    """
    # Alembic takes as long to import as everything else here, and most starts migrate nothing.
    from alembic.operations import Operations
    from alembic.runtime.migration import MigrationContext

    version = version_of(connection)
    op = Operations(MigrationContext.configure(connection))
    for number, migration in (known() if migrations is None else migrations).items():
        if number <= version:
            continue
        migration(op)
        _set(connection, number)
        version = number
    _check_references(connection)
    return version


def _set(connection: Connection, number: int) -> None:
    statement = sa.insert(_VERSION) if number == 1 else sa.update(_VERSION)
    connection.execute(statement.values(version=number))


def _check_references(connection: Connection) -> None:
    """SQLite changes a table by making another; keys into it are checked only once all is done."""
    if connection.dialect.name != "sqlite":
        return
    broken = connection.exec_driver_sql("PRAGMA foreign_key_check").first()
    if broken is not None:
        raise StoreError(
            f"the catalog has a row in {broken[0]} that refers to nothing in {broken[2]}; restore "
            "it from a copy and try again"
        )
