"""Catalog: what exists, in one transactional database.

SQLite on one machine; `Catalog.connect` takes any SQLAlchemy URL, and everything that only SQLite
needs is in `_prepare_sqlite`. Several processes use one catalog at once: writers queue behind one
lock for at most BUSY_S, readers see one consistent snapshot and never block.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import Connection, Engine

from draftkeep.errors import StoreError
from draftkeep.store import schema

BUSY_S = 30.0
# SQLite's bound on variables in a statement is 32,766; a row of three must fit many times.
CHUNK = 500


class Catalog:
    """An open catalog. `begin()` writes, `read()` reads, `close()` ends it.

    Threads may share one; a forked child must open its own.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @classmethod
    def open(cls, path: Path) -> "Catalog":
        """Open the SQLite catalog at `path`; creates it, and its directory, where missing.

        Raises StoreError when the file is of a newer schema or is no catalog.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        return cls.connect(f"sqlite:///{path}")

    @classmethod
    def connect(cls, url: str) -> "Catalog":
        """Open the catalog at a SQLAlchemy URL; creates the tables where missing."""
        engine = sa.create_engine(url)
        if engine.dialect.name == "sqlite":
            _prepare_sqlite(engine)
        catalog = cls(engine)
        try:
            catalog._ensure_schema()
        except BaseException:
            engine.dispose()
            raise
        return catalog

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        """A write transaction: holds the writers' lock from its first statement to its end.

        Commits on leaving the block, rolls back when it raises.
        """
        with self.engine.begin() as connection:
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A read transaction: one snapshot, no lock."""
        with self.engine.connect().execution_options(draftkeep_read=True) as connection:
            yield connection

    def close(self) -> None:
        """Close every pooled connection."""
        self.engine.dispose()

    def _ensure_schema(self) -> None:
        try:
            with self.begin() as connection:
                schema.metadata.create_all(connection)
                version = connection.scalar(sa.select(schema.schema_version.c.version))
                if version is None:
                    connection.execute(
                        sa.insert(schema.schema_version).values(version=schema.SCHEMA_VERSION)
                    )
                    version = schema.SCHEMA_VERSION
        except sa.exc.DatabaseError as error:
            raise StoreError(
                f"the catalog at {self.engine.url!r} cannot be opened ({error.orig}); "
                "check the path, its permissions and that it is a catalog"
            ) from None
        if version != schema.SCHEMA_VERSION:
            raise StoreError(
                f"catalog schema version {version}, expected {schema.SCHEMA_VERSION}; "
                "install the version of draftkeep that wrote it"
            )


def insert(connection: Connection, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
    """An INSERT that knows `on_conflict_do_nothing` and `on_conflict_do_update`."""
    if connection.dialect.name == "sqlite":
        return sqlite.insert(table)
    return postgresql.insert(table)


def _prepare_sqlite(engine: Engine) -> None:
    event.listen(engine, "connect", _on_connect)
    event.listen(engine, "begin", _on_begin)


def _on_connect(connection: Any, _record: object) -> None:
    # The driver would begin late, at the first INSERT: after a read that the write relies on.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000)}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.close()


def _on_begin(connection: Connection) -> None:
    reading = connection.get_execution_options().get("draftkeep_read", False)
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")
