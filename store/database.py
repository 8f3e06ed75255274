"""What each database needs: settings of a connection, locks, snapshots, and errors in our words.

Both give the same promises. A write transaction sees every write that committed before it and
is durable when it has committed; a read transaction sees one snapshot and blocks nobody.

SQLite has one writer at a time. PostgreSQL takes the writers' lock as an advisory lock of the
transaction: alone, or shared with others whose statements settle by rows who wins. What the lock
orders is read after it was granted, since each statement of a write transaction (READ COMMITTED)
sees what has committed by then.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine import URL, Connection, Engine
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement
from sqlalchemy.util import immutabledict

from draftkeep.errors import ConfigError, ConflictError, PermanentError, StoreError
from draftkeep.store import answers

# How long a writer waits for the others.
BUSY_S = 30.0
# How long PostgreSQL lets a writer hold its locks and say nothing: a frozen process must not stop
# the others for ever. Far above what any transaction does between two statements.
_SILENT_S = 120.0
_CONNECT_S = 10
# How soon a connection on which nothing moves is probed, and how often, by either side; and how
# long what we sent may stay without an acknowledgement. A machine that is gone is noticed in a
# minute.
_KEEPALIVES = {"keepalives_idle": 30, "keepalives_interval": 10, "keepalives_count": 3}
_NETWORK = {"tcp_user_timeout": 60_000, **_KEEPALIVES}
# What a commit of a batch touches of the indexes must fit, or pages are written twice.
_CACHE_KB = 65536
# When SQLite moves pages from its write-ahead log into the file, 32 MiB. A batch touches more than
# SQLite's own 1,000 pages, with which every commit would write its pages twice.
_WAL_PAGES = 8192
_WRITERS_LOCK = int.from_bytes(b"draftkee", "big")
_BUSY = "55P03"
_ROLLED_BACK = frozenset({"40001", "40P01"})


class Mode(StrEnum):
    """What a transaction is for; an execution option of its connection."""

    READ = "read"
    ALONE = "alone"
    SHARED = "shared"


def make_engine(
    url: str, password: str | None = None, *, quiet_s: float = answers.QUIET_S
) -> Engine:
    """An engine for a SQLite or PostgreSQL URL. Raises ConfigError for any other.

    A PostgreSQL that answers nobody is given up once a statement was silent for `quiet_s`.
    """
    try:
        parsed = sa.make_url(url)
    except (sa.exc.ArgumentError, ValueError):
        # Not even the scheme of what cannot be parsed: it could be a password.
        raise ConfigError(
            "the catalog's URL cannot be read; expected postgresql://USER@HOST:PORT/DATABASE"
        ) from None
    if parsed.get_backend_name() == "sqlite":
        engine = sa.create_engine(parsed, hide_parameters=True)
        event.listen(engine, "connect", _on_sqlite_connect)
        event.listen(engine, "begin", _on_sqlite_begin)
        return engine
    if parsed.get_backend_name() != "postgresql":
        raise ConfigError(
            f"a catalog in {parsed.get_backend_name()} was asked for; it lives in SQLite or "
            "PostgreSQL"
        )
    parsed = parsed.set(drivername="postgresql+psycopg")
    if password is not None:
        parsed = parsed.set(password=password)
    ours = {"connect_timeout": _CONNECT_S, "application_name": "draftkeep", **_NETWORK}
    engine = sa.create_engine(
        parsed,
        hide_parameters=True,
        pool_pre_ping=True,
        connect_args={name: value for name, value in ours.items() if name not in parsed.query},
    )

    @event.listens_for(engine, "do_connect")
    def connect(_dialect: object, _record: object, given: Any, parameters: Any) -> Any:
        return answers.connect(*given, quiet_s=quiet_s, **parameters)

    event.listen(engine, "connect", _on_postgres_connect)
    event.listen(engine, "begin", _on_postgres_begin)
    return engine


def connect(engine: Engine, mode: Mode) -> Connection:
    """A connection whose next transaction is of this mode."""
    options: dict[str, Any] = {"draftkeep_mode": mode}
    if mode is Mode.READ and engine.dialect.name == "postgresql":
        options |= {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
    return engine.connect().execution_options(**options)


@contextmanager
def explained(engine: Engine) -> Iterator[None]:
    """Turn errors of the connection, of its locks and of values into StoreError.

    ConflictError where the database chose this transaction to give way: nothing of it happened.
    PermanentError where it refused a statement: tables that are not ours, or that this user may not
    use. Errors of constraints (IntegrityError) pass as they are.
    """
    try:
        yield
    except sa.exc.DataError as error:
        # The driver's words may quote the value.
        raise StoreError(
            f"the catalog at {shown(engine.url)} cannot hold a value "
            f"({type(error.orig).__name__}); report what was being written"
        ) from None
    except sa.exc.ProgrammingError as error:
        reason = str(error.orig).partition("\n")[0]
        raise PermanentError(
            f"the catalog at {shown(engine.url)} refused a statement ({reason}); check that its "
            "tables are as draftkeep made them and that this user may use them"
        ) from None
    except (sa.exc.OperationalError, sa.exc.InterfaceError, sa.exc.InternalError) as error:
        raise explain(engine.url, error) from None


def explain(url: URL, error: sa.exc.DBAPIError) -> StoreError:
    """What a failure of the database means to an operator, without a password."""
    state = getattr(error.orig, "sqlstate", None)
    reason = str(error.orig).partition("\n")[0]
    if state in _ROLLED_BACK:
        return ConflictError(f"another writer of the catalog won ({reason}); start again")
    if state == _BUSY or reason == "database is locked":
        return StoreError(
            f"the catalog at {shown(url)} was busy for {BUSY_S:g} s; try again, and look for a "
            "process that hangs"
        )
    if url.password:
        reason = reason.replace(str(url.password), "***")
    remedy = (
        "that it is there, that this user may write to it and that the disk has room"
        if url.get_backend_name() == "sqlite"
        else "catalog.url, its password and that the server runs"
    )
    return StoreError(f"the catalog at {shown(url)} cannot be used ({reason}); check {remedy}")


def shown(url: URL) -> str:
    """The URL for a message, as it is configured: no driver, no password and no parameters."""
    plain = url._replace(password=None, query=immutabledict())
    return plain.set(drivername=url.get_backend_name()).render_as_string()


def insert(connection: Connection, table: sa.Table) -> sqlite.Insert | postgresql.Insert:
    """An INSERT that knows `on_conflict_do_nothing` and `on_conflict_do_update`."""
    if connection.dialect.name == "sqlite":
        return sqlite.insert(table)
    return postgresql.insert(table)


def insert_many(connection: Connection, table: sa.Table, rows: Iterable[Mapping[str, Any]]) -> None:
    """Insert many rows, which give every column a value of its plain type, as fast as can be.

    Raises IntegrityError, OperationalError and DataError as any INSERT does.
    """
    # The driver's own ways: SQLAlchemy would spend more on the values than the database does.
    columns = list(table.columns)
    names = ", ".join(f'"{column.name}"' for column in columns)
    values = [[row[column.name] for column in columns] for row in rows]
    driver: Any = connection.dialect.dbapi
    cursor: Any = connection.connection.cursor()
    try:
        if connection.dialect.name == "sqlite":
            marks = ", ".join("?" * len(columns))
            statement = f'INSERT INTO "{table.name}" ({names}) VALUES ({marks})'  # noqa: S608
            cursor.executemany(statement, values)
            return
        statement = f'COPY "{table.name}" ({names}) FROM STDIN (FORMAT BINARY)'
        with cursor.copy(statement) as copy:
            copy.set_types([_type_name(column, connection) for column in columns])
            for value in values:
                copy.write_row(value)
    except driver.IntegrityError as error:
        raise sa.exc.IntegrityError(statement, None, error) from error
    except driver.OperationalError as error:
        raise sa.exc.OperationalError(statement, None, error) from error
    except driver.DataError as error:
        raise sa.exc.DataError(statement, None, error) from error
    finally:
        cursor.close()


def _type_name(column: sa.Column[Any], connection: Connection) -> str:
    # The driver knows types in lower case and by their own names.
    name = column.type.compile(connection.dialect).lower()
    return "float8" if name == "float" else name


class utf8(FunctionElement[bytes]):
    """The UTF-8 bytes of a text."""

    type = sa.LargeBinary()
    inherit_cache = True


@compiles(utf8, "sqlite")
def _utf8_sqlite(element: utf8, compiler: Any, **options: Any) -> str:
    return f"CAST({compiler.process(element.clauses, **options)} AS BLOB)"


@compiles(utf8, "postgresql")
def _utf8_postgres(element: utf8, compiler: Any, **options: Any) -> str:
    # A cast would read backslashes as escapes.
    return f"convert_to({compiler.process(element.clauses, **options)}, 'UTF8')"


def _on_sqlite_connect(connection: Any, _record: object) -> None:
    # The driver would begin late, at the first INSERT: after a read that the write relies on.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout = {int(BUSY_S * 1000)}")
    cursor.execute("PRAGMA journal_mode = WAL")
    cursor.execute("PRAGMA synchronous = FULL")
    cursor.execute("PRAGMA foreign_keys = ON")
    cursor.execute(f"PRAGMA cache_size = -{_CACHE_KB}")
    cursor.execute(f"PRAGMA wal_autocheckpoint = {_WAL_PAGES}")
    cursor.close()


def _on_sqlite_begin(connection: Connection) -> None:
    reading = connection.get_execution_options().get("draftkeep_mode") is Mode.READ
    connection.exec_driver_sql("BEGIN" if reading else "BEGIN IMMEDIATE")


def _on_postgres_connect(connection: Any, _record: object) -> None:
    settings = {
        "lock_timeout": int(BUSY_S * 1000),
        "idle_in_transaction_session_timeout": int(_SILENT_S * 1000),
        # The log is freed of what a commit covers, so a commit must outlive a crash.
        "synchronous_commit": "on",
        # Estimates grow with the tables and our answers do not: compiling took longer than asking.
        "jit": "off",
        **{f"tcp_{name}": value for name, value in _KEEPALIVES.items()},
    }
    connection.execute("; ".join(f"SET {name} = {value}" for name, value in settings.items()))
    connection.commit()


def _on_postgres_begin(connection: Connection) -> None:
    mode = connection.get_execution_options().get("draftkeep_mode")
    if mode is Mode.ALONE:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_WRITERS_LOCK})")
    elif mode is Mode.SHARED:
        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock_shared({_WRITERS_LOCK})")


@contextmanager
def migrating(engine: Engine) -> Iterator[Connection]:
    """A write transaction in which tables may change: SQLite enforces no references in it."""
    with connect(engine, Mode.ALONE) as connection:
        if engine.dialect.name == "sqlite":
            # Without effect inside a transaction, so before it; and back for the pool's next user.
            _enforce_references(connection, False)
        try:
            with connection.begin():
                yield connection
        finally:
            if engine.dialect.name == "sqlite":
                _enforce_references(connection, True)


def _enforce_references(connection: Connection, on: bool) -> None:
    cursor = connection.connection.cursor()
    cursor.execute(f"PRAGMA foreign_keys = {'ON' if on else 'OFF'}")
    cursor.close()
