"""Log files: the embedded log on disk, SQLite files of one stretch of time each.

A busy stretch has several. A file is named by the start of its stretch and by its first offset, so
that a reader finds the right one without opening any. The newest file also holds the log's
identity and the next offset to give out: it is never removed, so neither can be lost while the log
is in use.
"""

import contextlib
import os
import re
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from draftkeep import files
from draftkeep.errors import StoreError

PAGE_BYTES = 16384
FORMAT_VERSION = 1

_BUSY_S = 60.0
_DELETE_ROWS = 256
_NAME = re.compile(r"(\d{12})-(\d{19})\.db")
_NEW = "new.tmp"
_SIDE_FILES = ("-wal", "-shm", "-journal")

_SCHEMA = f"""
PRAGMA page_size = {PAGE_BYTES};
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA synchronous = FULL;
PRAGMA user_version = {FORMAT_VERSION};
BEGIN;
CREATE TABLE records (id INTEGER PRIMARY KEY, appended_s REAL NOT NULL, data BLOB NOT NULL);
CREATE TABLE state (cluster TEXT NOT NULL, topic TEXT NOT NULL, next INTEGER NOT NULL);
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogFile:
    """One file: when its stretch of time starts and the first offset that may lie in it."""

    path: Path
    start_s: int
    first: int


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the newest file says about the whole log."""

    cluster: str
    topic: str
    next: int


def list_files(directory: Path) -> list[LogFile]:
    """All complete files, oldest first."""
    found = []
    for entry in os.scandir(directory):
        if match := _NAME.fullmatch(entry.name):
            start_s, first = int(match[1]), int(match[2])
            found.append(LogFile(path=directory / entry.name, start_s=start_s, first=first))
    return sorted(found, key=lambda file: (file.start_s, file.first))


def create_file(directory: Path, start_s: int, state: State) -> LogFile:
    """Make the file for the stretch that starts at `start_s`, whose first offset is `state.next`.

    It appears complete and durable under its name, or not at all.
    """
    remove_files(directory / _NEW)
    with contextlib.closing(sqlite3.connect(directory / _NEW, isolation_level=None)) as connection:
        connection.executescript(_SCHEMA)
        row = (state.cluster, state.topic, state.next)
        connection.execute("INSERT INTO state VALUES (?, ?, ?)", row)
        connection.execute("COMMIT")
        connection.execute("PRAGMA journal_mode = WAL")
    path = directory / f"{start_s:012d}-{state.next:019d}.db"
    os.rename(directory / _NEW, path)
    files.sync(directory)
    return LogFile(path=path, start_s=start_s, first=state.next)


@contextlib.contextmanager
def opened(file: LogFile) -> Iterator[sqlite3.Connection]:
    """A connection for the length of a `with` block; see `connect`."""
    connection = connect(file)
    try:
        yield connection
    finally:
        connection.close()


def connect(file: LogFile) -> sqlite3.Connection:
    """Open an existing file in autocommit mode; commits are durable when they return.

    Raises sqlite3.Error where it is not there or damaged, StoreError where its format is newer.
    """
    connection = sqlite3.connect(
        f"{file.path.absolute().as_uri()}?mode=rw",
        uri=True,
        timeout=_BUSY_S,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        connection.execute("PRAGMA synchronous = FULL")
        connection.execute("PRAGMA secure_delete = ON")
        connection.execute("PRAGMA wal_autocheckpoint = 256")
        connection.execute(f"PRAGMA journal_size_limit = {256 * PAGE_BYTES}")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
    except sqlite3.Error:
        connection.close()
        raise
    if version != FORMAT_VERSION:
        connection.close()
        raise StoreError(
            f"{file.path.name} has log format {version}, expected {FORMAT_VERSION}; "
            "use the draftkeep version that wrote it, or move the log directory aside"
        )
    return connection


def read_state(connection: sqlite3.Connection) -> State:
    """The identity and the next offset as the file holds them."""
    cluster, topic, following = connection.execute("SELECT * FROM state").fetchone()
    return State(cluster=cluster, topic=topic, next=following)


def delete_rows(connection: sqlite3.Connection, up_to: int) -> None:
    """Overwrite and delete the records below `up_to` and give their pages back to the disk.

    Goes in small transactions: the writer waits for one of them, not for all.
    """
    query = (
        "DELETE FROM records WHERE id IN (SELECT id FROM records WHERE id < ? ORDER BY id LIMIT ?)"
    )
    while connection.execute(query, (up_to, _DELETE_ROWS)).rowcount:
        # executescript steps to the end; execute would give back a single page.
        connection.executescript("PRAGMA incremental_vacuum")
    truncate_wal(connection)


def truncate_wal(connection: sqlite3.Connection) -> None:
    """Move the write-ahead log into the file and empty it; a busy reader only defers that."""
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def remove_files(path: Path) -> None:
    """Unlink a database and what SQLite keeps beside it; the database first.

    Nobody can open a file half removed that way, and a crash in between leaves strays that
    `sweep_strays` recognises. Processes that have the file open keep what they see.
    """
    path.unlink(missing_ok=True)
    for suffix in _SIDE_FILES:
        path.with_name(path.name + suffix).unlink(missing_ok=True)


def sweep_strays(directory: Path) -> None:
    """Unlink side files whose database is gone.

    A name is never given twice (offsets only rise), so these can belong to no later file.
    """
    for entry in list(os.scandir(directory)):
        for suffix in _SIDE_FILES:
            name = entry.name.removesuffix(suffix)
            if name != entry.name and _NAME.fullmatch(name) and not (directory / name).exists():
                (directory / entry.name).unlink(missing_ok=True)


def directory_bytes(directory: Path) -> int:
    """The length of every file in the directory, added up."""
    total = 0
    for entry in os.scandir(directory):
        with contextlib.suppress(FileNotFoundError):
            total += entry.stat().st_size
    return total
