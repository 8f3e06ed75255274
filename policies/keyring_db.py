"""The file behind the keyring: SQLite rows, one lock for all writers, and deletion that is final.

    periods    a tenant's period: the signed public record, and the private key under period.kek
    lookups    a tenant's lookup key, under subject.kek
    subjects   a subject's key (or, kind 0, the key of a period's anonymous callers), subject.kek
    aliases    (alias, period) -> which subject row, the pointer itself under subject.kek
    meta       schema version, the issuer's public key, one check value per KEK, erasures counted
               and, of them, those whose bytes have left the files

Public columns are what an auditor may see; every secret is wrapped before it gets here.
"""

import fcntl
import os
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from draftkeep.errors import ConfigError, StoreError

SCHEMA_VERSION = 1
FILE_NAME = "keyring.db"
LOCK_NAME = "keyring.lock"
_BUSY_S = 10.0
_SCRUB_TRIES = 40
_SCRUB_PAUSE_S = 0.25

# WITHOUT ROWID: row numbers would keep the order in which aliases and subjects came, and link them.
# Aliases lie by period, so that a period's end takes neighbours.
_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value NOT NULL) WITHOUT ROWID;
CREATE TABLE periods (
    period_id BLOB PRIMARY KEY, tenant TEXT NOT NULL,
    start_s INTEGER NOT NULL, destroy_at_s INTEGER NOT NULL,
    public_key BLOB NOT NULL, signature BLOB NOT NULL, private_wrapped BLOB NOT NULL,
    UNIQUE (tenant, start_s)) WITHOUT ROWID;
CREATE TABLE lookups (tenant TEXT PRIMARY KEY, key_wrapped BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE subjects (
    subject_id BLOB PRIMARY KEY, tenant TEXT NOT NULL, kind INTEGER NOT NULL, tag BLOB NOT NULL,
    key_wrapped BLOB NOT NULL, last_start_s INTEGER NOT NULL, last_destroy_at_s INTEGER NOT NULL,
    UNIQUE (tenant, kind, tag)) WITHOUT ROWID;
CREATE INDEX subjects_by_deadline ON subjects (last_destroy_at_s);
CREATE TABLE aliases (
    alias BLOB NOT NULL, period_id BLOB NOT NULL, pointer_wrapped BLOB NOT NULL,
    PRIMARY KEY (period_id, alias)) WITHOUT ROWID;
"""

Row = tuple[Any, ...]


class _Explained:
    """A context in which an error of SQLite becomes a StoreError that says what to look at."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if isinstance(error, sqlite3.Error):
            raise StoreError(
                f"{FILE_NAME}: {error}; check disk space, permissions and that the file is a "
                "keyring"
            ) from error


# One for all: it is entered for every trace that a job opens, and knows nothing.
_EXPLAINED = _Explained()


class KeyringDb:
    """One connection to `keyring.db`. Thread-safe; any number of processes may each hold one.

    A commit is on disk when `write` returns (WAL, synchronous=FULL). Not to be used across a fork.
    """

    def __init__(self, directory: Path, *, create: bool) -> None:
        self._path = directory / FILE_NAME
        self._lock_path = directory / LOCK_NAME
        if not create and not self._path.exists():
            raise ConfigError(
                f"no {FILE_NAME} in the keys directory; start the keyring once (`draftkeep serve`) "
                "or correct keys_dir"
            )
        self._mutex = threading.RLock()
        self._seen_version = -1
        self._erasures = 0
        with self._locked(), _EXPLAINED:
            self._connection = self._connect()
            self._prepare(create)

    def read(self, sql: str, values: Sequence[object] = ()) -> list[Row]:
        """All rows of one query. The read is over when this returns, so it never blocks a scrub."""
        with self._mutex, _EXPLAINED:
            return self._connection.execute(sql, values).fetchall()

    @contextmanager
    def write(self) -> Iterator[sqlite3.Connection]:
        """One transaction under the lock of all writers; rolled back if the body raises."""
        with self._locked(), self._mutex, self._transaction() as connection:
            yield connection

    @contextmanager
    def erase(self) -> Iterator[sqlite3.Connection]:
        """A `write` that deletes: it counts as an erasure, and its bytes are gone from the disk.

        The counter moves in the same transaction, so every cache learns of it. StoreError where
        another process keeps a read transaction open: the rows are deleted, but their bytes stay
        in the -wal file until a later erasure, repetition or opening of the keyring finishes it.
        """
        with self.write() as connection:
            yield connection
            connection.execute("UPDATE meta SET value = value + 1 WHERE name = 'erasures'")
        self.scrub()

    def scrub(self, *, tries: int = _SCRUB_TRIES) -> None:
        """Move the write-ahead log into the database and truncate it, over deleted bytes too."""
        for attempt in range(tries):
            if attempt:
                time.sleep(_SCRUB_PAUSE_S)
            if self._truncate():
                return
        raise StoreError(
            f"{FILE_NAME}-wal could not be truncated: another process holds a read transaction "
            "open. The keys are deleted, their wrapped bytes still lie in that file: end the "
            "reader (a backup, an sqlite shell) and run the erasure again"
        )

    def scrub_pending(self) -> bool:
        """Whether deleted bytes may still lie in a file, because an erasure was interrupted."""
        return int(self.meta("scrubbed")) < int(self.meta("erasures"))

    def erasures(self) -> int:
        """How many erasures this keyring has seen, by any process.

        Costs one PRAGMA unless somebody wrote since the last call.
        """
        with self._mutex, _EXPLAINED:
            version = self._connection.execute("PRAGMA data_version").fetchall()[0][0]
            if version != self._seen_version:
                self._erasures = int(self.meta("erasures"))
                self._seen_version = version
            return self._erasures

    def meta(self, name: str) -> Any:
        """A value of the meta table; None where there is none."""
        rows = self.read("SELECT value FROM meta WHERE name = ?", (name,))
        return rows[0][0] if rows else None

    def claim(self, name: str, value: bytes) -> bytes:
        """Store `value` under `name` unless there is one; returns the one that stands."""
        with self.write() as connection:
            connection.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (name, value))
        return bytes(self.meta(name))

    def close(self) -> None:
        """Close the connection."""
        with self._mutex:
            self._connection.close()

    def _truncate(self) -> bool:
        with self._locked(), self._mutex, _EXPLAINED:
            erasures = self.meta("erasures")
            # Waiting inside SQLite would keep both locks, and with them every seal, waiting.
            self._connection.execute("PRAGMA busy_timeout = 0")
            try:
                rows = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            finally:
                self._connection.execute(f"PRAGMA busy_timeout = {int(_BUSY_S * 1000)}")
            if rows[0][0] != 0:
                return False
            self._connection.execute(
                "UPDATE meta SET value = ? WHERE name = 'scrubbed'", (erasures,)
            )
        return True

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with _EXPLAINED:
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                # A full disk may have ended the transaction already.
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise
            finally:
                # data_version does not move for a connection's own commits.
                self._seen_version = -1

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # A new descriptor each time: flock then also excludes the threads of this process.
        handle = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _connect(self) -> sqlite3.Connection:
        handle = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        os.close(handle)
        connection = sqlite3.connect(
            self._path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False
        )
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "secure_delete=ON"):
            connection.execute(f"PRAGMA {pragma}").fetchall()
        return connection

    def _prepare(self, create: bool) -> None:
        tables = self.read("SELECT count(*) FROM sqlite_schema")[0][0]
        if tables == 0 and create:
            with self._transaction() as connection:
                for statement in _SCHEMA.split(";"):
                    connection.execute(statement)
                rows = [("schema", SCHEMA_VERSION), ("erasures", 0), ("scrubbed", 0)]
                connection.executemany("INSERT INTO meta VALUES (?, ?)", rows)
        version = self.meta("schema") if tables or create else None
        if version != SCHEMA_VERSION:
            self._connection.close()
            raise StoreError(
                f"{FILE_NAME} has schema version {version}, this program knows {SCHEMA_VERSION}; "
                "use the release that wrote it"
            )
