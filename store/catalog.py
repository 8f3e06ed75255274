"""Catalog: what exists, in one transactional database.

SQLite on one machine, PostgreSQL for several; `database` knows what each needs. Several processes
use one catalog at once: writers queue behind one lock, for at most `database.BUSY_S`; readers see
one consistent snapshot and never block.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa
from sqlalchemy.engine import Connection, Engine

from draftkeep.config import Config
from draftkeep.errors import NoCatalogError, PermanentError
from draftkeep.store import database, migrations, schema
from draftkeep.store.database import Mode

FILE = "catalog.db"
# SQLite's bound on variables in a statement is 32,766; a row of three must fit many times.
CHUNK = 500


class Catalog:
    """An open catalog. `begin()` writes, `read()` reads, `close()` ends it.

    Threads may share one; a forked child must open its own. A lost connection, and a lock that
    others held for `database.BUSY_S`, is a StoreError; the next transaction connects again. After
    one that was raised on leaving `begin()` it is not known whether the transaction committed.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @classmethod
    def configured(cls, config: Config, *, create: bool = True, migrate: bool = True) -> "Catalog":
        """Open the catalog that a configuration names: SQLite in `state_dir`, or PostgreSQL.

        NoCatalogError where it is not there and `create` is False: a mistyped path or URL must not
        make an empty one. PermanentError where it is of an earlier schema and `migrate` is False,
        for a command that only looks: there is no way back.
        """
        if config.catalog.url:
            return cls.connect(
                config.catalog.url,
                password=config.catalog.read_password(),
                create=create,
                migrate=migrate,
            )
        if not create and not (config.state_dir / FILE).exists():
            raise NoCatalogError(
                f"no catalog in {config.state_dir}; check state_dir, or start the service"
            )
        return cls.open(config.state_dir / FILE, create=create, migrate=migrate)

    @classmethod
    def existing(cls, config: Config) -> "Catalog | None":
        """The catalog of a configuration, to look at; None where nobody has made it yet.

        Neither makes nor upgrades it; raises as `configured` does.
        """
        try:
            return cls.configured(config, create=False, migrate=False)
        except NoCatalogError:
            return None

    @classmethod
    def open(cls, path: Path, *, create: bool = True, migrate: bool = True) -> "Catalog":
        """Open the SQLite catalog at `path`; makes it, and its directory, where `create` lets it.

        Raises PermanentError when the file is of a newer schema or is no catalog, and when it is
        of an earlier one and `migrate` is False; NoCatalogError as `connect` does.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        return cls.connect(f"sqlite:///{path}", create=create, migrate=migrate)

    @classmethod
    def connect(
        cls, url: str, *, password: str | None = None, create: bool = True, migrate: bool = True
    ) -> "Catalog":
        """Open the catalog at a SQLAlchemy URL; brings its schema up to this version's.

        Raises StoreError when it cannot be reached, PermanentError when it is of a newer schema or
        no catalog, or of an earlier one and `migrate` is False, and NoCatalogError where there
        is none and `create` is False.
        """
        engine = database.make_engine(url, password)
        catalog = cls(engine)
        try:
            catalog._ensure_schema(create, migrate)
        except BaseException:
            engine.dispose()
            raise
        return catalog

    @contextmanager
    def begin(self, *, shared: bool = False) -> Iterator[Connection]:
        """A write transaction: holds the writers' lock from its beginning to its end.

        Commits on leaving the block, rolls back when it raises. `shared` lets others that share
        run beside it where the database can: for statements whose outcome rows alone decide (a
        compare-and-set, a unique key, a row locked before it is changed).
        """
        mode = Mode.SHARED if shared else Mode.ALONE
        with (
            database.explained(self.engine),
            database.connect(self.engine, mode) as connection,
            connection.begin(),
        ):
            yield connection

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A read transaction: one snapshot, no lock."""
        with (
            database.explained(self.engine),
            database.connect(self.engine, Mode.READ) as connection,
        ):
            yield connection

    def reach(self) -> None:
        """Raises StoreError where the database does not answer."""
        with self.read() as connection:
            connection.execute(sa.select(sa.literal(1)))

    @property
    def place(self) -> str:
        """Where the catalog is, for a person: a path, or a URL without its password."""
        url = self.engine.url
        return url.database or "" if url.drivername == "sqlite" else database.shown(url)

    def close(self) -> None:
        """Close every pooled connection."""
        self.engine.dispose()

    def _ensure_schema(self, create: bool, migrate: bool) -> None:
        try:
            with self.read() as connection:
                version = migrations.version_of(connection)
            if version == 0 and not create:
                raise NoCatalogError(
                    f"no catalog at {self.place}; check where that is, or start the service"
                )
            if 0 < version < schema.SCHEMA_VERSION and not migrate:
                raise PermanentError(
                    f"the catalog at {self.place} has schema version {version}, expected "
                    f"{schema.SCHEMA_VERSION}; copy the catalog, then start the service or run "
                    "draftkeep compact, which bring it up to date"
                )
            if version < schema.SCHEMA_VERSION:
                version = self._migrate()
        except sa.exc.DatabaseError as error:
            raise PermanentError(
                f"the catalog at {self.place} cannot be opened ({error.orig}); "
                "check the path, its permissions and that it is a catalog"
            ) from None
        if version != schema.SCHEMA_VERSION:
            raise PermanentError(
                f"catalog schema version {version}, expected {schema.SCHEMA_VERSION}; "
                "install the version of draftkeep that wrote it"
            )

    def _migrate(self) -> int:
        # Under the writers' lock: of several processes that start at once, one migrates.
        with database.explained(self.engine), database.migrating(self.engine) as connection:
            return migrations.upgrade(connection)
