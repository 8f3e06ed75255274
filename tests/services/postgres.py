"""A PostgreSQL server of the tests' own, from the machine's package, in a temporary directory."""

import contextlib
import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psycopg
from psycopg import sql

from tests.services.needs import POSTGRESQL
from tests.services.processes import Service, free_port

_USER = "draftkeep"


class Postgres:
    """One server on 127.0.0.1 that trusts whoever connects. Its port and data stay the same."""

    def __init__(self, directory: Path, *, port: int, settings: Mapping[str, str]) -> None:
        """Make the cluster of databases in `directory`; `settings` go to the server's command."""
        self._directory = directory
        self._settings = settings
        self._owner = _owner()
        self._service: Service | None = None
        self._names = (f"test_{number}" for number in itertools.count(1))
        self.port = port
        self._initdb()

    def url(self, database: str = "postgres") -> str:
        """The URL of a database, for SQLAlchemy with psycopg."""
        return f"postgresql+psycopg://{_USER}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Start the server and wait until it answers."""
        options = {
            "port": str(self.port),
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            **self._settings,
        }
        command: list[str | Path] = [_programs() / "postgres", "-D", self._data]
        for name, value in options.items():
            command += ["-c", f"{name}={value}"]
        # SIGQUIT is its immediate end; after SIGKILL its other processes would linger a while.
        self._service = Service(
            command, log=self._directory / "log", user=self._owner, orphan_signal="QUIT"
        )
        self._service.until(self._answers, "PostgreSQL")

    def crash(self) -> None:
        """End it at once, all its processes, without a checkpoint; `start` then recovers."""
        if self._service is not None and self._service.running:
            self.thaw()
            self._service.stop(ask=signal.SIGQUIT)

    def freeze(self) -> None:
        """SIGSTOP to all its processes: connections stay open and nothing answers."""
        self._signal_all(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT. Harmless where it was not frozen."""
        self._signal_all(signal.SIGCONT)

    def create_database(self) -> str:
        """A fresh, empty database; returns its URL."""
        name = next(self._names)
        with self._connect() as connection:
            connection.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(name)))
        return self.url(name)

    def drop_database(self, url: str) -> None:
        """Drop what `create_database` made, whoever is still connected."""
        name = sql.Identifier(url.rsplit("/", 1)[1])
        with self._connect() as connection:
            connection.execute(sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(name))

    def _signal_all(self, number: signal.Signals) -> None:
        if self._service is None:
            return
        first = self._service.pid
        # The first one first: once it is frozen it makes no others.
        os.kill(first, number)
        while number == signal.SIGSTOP and _status(first)[0] not in "TZ":
            time.sleep(0.001)
        for pid in [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]:
            with contextlib.suppress(OSError):
                if _status(pid)[1] == str(first):
                    os.kill(pid, number)

    @property
    def _data(self) -> Path:
        return self._directory / "data"

    def _initdb(self) -> None:
        self._data.mkdir(mode=0o700)
        command = [str(_programs() / "initdb"), "-D", str(self._data), "-U", _USER]
        command += ["-A", "trust", "-E", "UTF8", "--no-locale", "--no-sync", "--no-instructions"]
        if self._owner is not None:
            shutil.chown(self._data, self._owner)
            command = [
                "setpriv",
                f"--reuid={self._owner}",
                f"--regid={self._owner}",
                "--init-groups",
                *command,
            ]
        answer = subprocess.run(command, capture_output=True, text=True, cwd="/")
        if answer.returncode != 0:
            raise RuntimeError(f"initdb failed:\n{answer.stderr[-2000:]}")

    def _connect(self) -> psycopg.Connection[tuple[object, ...]]:
        return psycopg.connect(
            host="127.0.0.1",
            port=self.port,
            user=_USER,
            dbname="postgres",
            autocommit=True,
            connect_timeout=5,
        )

    def _answers(self) -> bool:
        try:
            with self._connect():
                return True
        except psycopg.OperationalError:
            return False


@contextlib.contextmanager
def running_postgres(
    *, fsync: bool = False, settings: Mapping[str, str] | None = None
) -> Iterator[Postgres]:
    """A server that answers, ended and its data removed at the end.

    Without `fsync` commits survive `crash`, and not the machine's; with it they take as long as
    the disk does.
    """
    # Not under pytest's directory: that is root's alone, and the server runs as somebody else.
    with tempfile.TemporaryDirectory(prefix="draftkeep-postgres-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        durable = {"fsync": "on"} if fsync else {"fsync": "off", "full_page_writes": "off"}
        postgres = Postgres(directory, port=free_port(), settings={**durable, **(settings or {})})
        try:
            postgres.start()
            yield postgres
        finally:
            postgres.crash()


def _status(pid: int) -> list[str]:
    """A process's state and its parent; OSError once it is gone."""
    # The program's name, in brackets, may hold anything.
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]


def _programs() -> Path:
    programs = POSTGRESQL.find()
    if programs is None:
        raise RuntimeError(f"{POSTGRESQL.name} is missing; run make services")
    return programs


def _owner() -> str | None:
    """Whom the server runs as: it refuses root, so the package's user, else nobody."""
    if os.geteuid() != 0:
        return None
    try:
        return pwd.getpwnam("postgres").pw_name
    except KeyError:
        return "nobody"
