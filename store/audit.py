"""Audit: SQL over what is stored, without a key and without a way out.

An in-memory DuckDB gets the catalog's tables and the shards' clear columns as registered Arrow
objects; then it loses access to files, networks, extensions and Python variables, and its
configuration is locked. What is sealed is not registered, so no query can reach it.
"""

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import duckdb
import pyarrow as pa
import pyarrow.dataset as ds
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.errors import InputError, StoreError
from draftkeep.store import schema
from draftkeep.store.audit_views import REPORTS, VIEWS
from draftkeep.store.catalog import Catalog
from draftkeep.store.shard import CLEAR_SCHEMA
from draftkeep.store.storage import Storage

ROW_LIMIT = 10_000
TIME_LIMIT_S = 10.0
_ATTEMPTS = 5
# What DuckDB says before the reason why Arrow could not read a shard.
_READING = "stream registered as '_shard_rows' failed: "

# The sealed record of a dead letter stays where it is.
_TABLES = {
    table: frozenset({"record"} if table is schema.dead_letters else ())
    for table in (
        schema.shards,
        schema.periods,
        schema.nodes,
        schema.node_tenants,
        schema.erasures,
        schema.log_deletions,
        schema.tombstones,
        schema.jobs,
        schema.drafters,
        schema.lineage,
        schema.channels,
        schema.drops,
        schema.gaps,
        schema.offsets,
        schema.dead_letters,
    )
}
_LOCKDOWN = (
    # Nobody tells DuckDB how many rows the shards have: it took them for few, and kept all of them
    # in memory to look up the few. So what a query joins to is what is kept.
    "SET disabled_optimizers = 'build_side_probe_side'",
    "SET threads = 2",
    "SET memory_limit = '512MB'",
    "SET temp_directory = ''",
    "SET python_enable_replacements = false",
    "SET autoinstall_known_extensions = false",
    "SET autoload_known_extensions = false",
    "SET allow_community_extensions = false",
    "SET enable_external_access = false",
    "SET lock_configuration = true",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditResult:
    """Rows of one query in order. `truncated` says that the row limit cut them off."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    truncated: bool


class AuditSession:
    """One auditor's look at a catalog and its shards, as of one moment.

    `now_s` is the auditor's clock. The catalog's part is a snapshot; when a shard was replaced
    since, the session takes a new one and asks again. Thread-safe: one query at a time.
    """

    def __init__(
        self,
        catalog: Catalog,
        storage: Storage,
        *,
        now_s: float,
        row_limit: int = ROW_LIMIT,
        time_limit_s: float = TIME_LIMIT_S,
    ) -> None:
        self._catalog = catalog
        self._storage = storage
        self._now_s = now_s
        self._row_limit = row_limit
        self._time_limit_s = time_limit_s
        self._mutex = threading.Lock()
        self._connect()

    def query(self, sql: str) -> AuditResult:
        """Run one SELECT.

        Raises InputError for anything else, for an error in the SQL, and when it needs more than
        the time or memory allowed.
        """
        statement = _single_select(sql)
        with self._mutex:
            for _ in range(_ATTEMPTS):
                try:
                    return self._run(statement)
                except duckdb.InterruptException:
                    raise InputError(
                        f"the query ran over {self._time_limit_s:g} s; narrow it", param="sql"
                    ) from None
                except duckdb.Error as error:
                    if not self._lost_a_shard():
                        raise self._explained(error) from None
                self._connection.close()
                self._connect()
        raise StoreError(f"shards were replaced under {_ATTEMPTS} attempts; ask again")

    def report(self, name: str) -> AuditResult:
        """One of the built-in reports: see `audit_views.REPORTS`. Raises InputError if unknown."""
        if name not in REPORTS:
            raise InputError(f"no report {name:.40}; there are {', '.join(REPORTS)}", param="name")
        return self.query(REPORTS[name])

    def close(self) -> None:
        """Drop the session's copy of the catalog."""
        with self._mutex:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _connect(self) -> None:
        with self._catalog.read() as connection:
            facts = {
                f"_{table.name}": _arrow(connection, table, hidden)
                for table, hidden in _TABLES.items()
            }
        self._names = facts["_shards"].column("name").to_pylist()
        self._connection = duckdb.connect(":memory:")
        for name, table in facts.items():
            self._connection.register(name, table)
        self._connection.register("_shard_rows", _shard_rows(self._storage, self._names))
        self._connection.register("session", pa.table({"now_s": [float(self._now_s)]}))
        for name, select in VIEWS.items():
            self._connection.execute(f"CREATE TEMP VIEW {name} AS {select}")
        for setting in _LOCKDOWN:
            self._connection.execute(setting)

    def _run(self, statement: duckdb.Statement) -> AuditResult:
        timer = threading.Timer(self._time_limit_s, self._connection.interrupt)
        timer.start()
        try:
            self._connection.execute(statement)
            rows = self._connection.fetchmany(self._row_limit + 1)
        finally:
            timer.cancel()
            timer.join()
        return AuditResult(
            columns=tuple(column[0] for column in self._connection.description or ()),
            rows=tuple(tuple(row) for row in rows[: self._row_limit]),
            truncated=len(rows) > self._row_limit,
        )

    def _lost_a_shard(self) -> bool:
        """Whether one was replaced since the snapshot; StoreError where one is still listed."""
        absent = set(self._names).difference(file.name for file in self._storage.list())
        if not absent:
            return False
        with self._catalog.read() as connection:
            lost = sorted(absent.intersection(connection.scalars(sa.select(schema.shards.c.name))))
        if lost:
            raise StoreError(
                f"{len(lost)} listed shards, {lost[0]} the first, "
                f"are not in {self._storage.place}; "
                "check that shards.url (or state_dir) is the one they were written under. "
                "draftkeep catalog check names them all; restore them from a backup"
            )
        return True

    def _explained(self, error: duckdb.Error) -> InputError | StoreError:
        _, of_storage, reason = str(error).partition(_READING)
        if not of_storage:
            return InputError(f"the query failed: {error}", param="sql")
        return StoreError(
            f"the shards in {self._storage.place} cannot be read ({reason:.400}); check the "
            "storage and who may read it. draftkeep catalog check names damaged files"
        )


def _single_select(sql: str) -> duckdb.Statement:
    try:
        statements = duckdb.extract_statements(sql)
    except duckdb.Error as error:
        raise InputError(f"the query cannot be parsed: {error}", param="sql") from None
    kinds = [statement.type.name for statement in statements]
    if kinds != ["SELECT"]:
        got = ", ".join(kinds) or "nothing"
        raise InputError(f"an audit query is exactly one SELECT, got {got}", param="sql")
    return statements[0]


def _arrow(connection: Connection, table: sa.Table, hidden: frozenset[str]) -> pa.Table:
    columns = [column for column in table.columns if column.name not in hidden]
    rows = connection.execute(sa.select(*columns)).all()
    arrays = {}
    for index, column in enumerate(columns):
        values: Sequence[Any] = [row[index] for row in rows]
        if isinstance(column.type, sa.JSON):
            values = [json.dumps(value, sort_keys=True) for value in values]
        arrays[column.name] = pa.array(values, type=_arrow_type(column.type))
    return pa.table(arrays)


def _arrow_type(kind: sa.types.TypeEngine[Any]) -> pa.DataType:
    if isinstance(kind, sa.Boolean):
        return pa.bool_()
    if isinstance(kind, sa.LargeBinary):
        return pa.binary()
    if isinstance(kind, sa.Integer):
        return pa.int64()
    if isinstance(kind, sa.Float):
        return pa.float64()
    return pa.string()


def _shard_rows(storage: Storage, names: Sequence[str]) -> ds.Dataset | pa.Table:
    if not names:
        return CLEAR_SCHEMA.empty_table()
    # With the schema given no file is opened before a query, and no other column exists.
    return ds.FileSystemDataset.from_paths(
        [storage.path(name) for name in names],
        schema=CLEAR_SCHEMA,
        format=ds.ParquetFileFormat(),
        filesystem=storage.filesystem,
    )
