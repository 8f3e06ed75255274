"""Run by test_keyring_crash: a keyring's life, killed before its n-th SQL statement, for every n.

Each life is a forked child that works in a fresh directory and writes a line for each step it has
been told is done. The parent then opens what is left and compares. Prints the number of lives.
"""

import os
import signal
import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from draftkeep.config import RetentionConfig
from draftkeep.errors import KeyDestroyedError
from draftkeep.policies.keyring import Keyring

START_S = 1_800_000_000
RETENTION = RetentionConfig(period_s=100, ttl_s=400)


def main(root: Path) -> None:
    lives = 0
    finished = False
    while not finished:
        lives += 1
        directory, told = root / str(lives), root / f"{lives}.told"
        pid = os.fork()
        if pid == 0:
            _live(directory, told, dies_before=lives)
            os._exit(0)
        finished = os.waitpid(pid, 0)[1] == 0
        _check(directory, dict(line.split() for line in told.read_text().splitlines()))
    print(lives)


def _live(directory: Path, told: Path, *, dies_before: int) -> None:
    left = dies_before

    def count(_: str) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    connect = sqlite3.connect

    def traced(*args: object, **kwargs: object) -> sqlite3.Connection:
        connection: sqlite3.Connection = connect(*args, **kwargs)  # type: ignore[call-overload]
        connection.set_trace_callback(count)
        return connection

    sqlite3.connect = traced  # type: ignore[assignment]
    with told.open("w", buffering=1) as out:
        keyring = Keyring.open(directory, retention=RETENTION, clock=lambda: START_S + 5.0)
        node = keyring.node_keys()
        old = keyring.ensure_period("acme", START_S)
        out.write(f"period {old.period_id.hex()}\n")
        for name in ("bob", "eve"):
            key = node.subject("acme", name, old.period_id)
            out.write(f"{name} {key.alias.hex()}\n")
        keyring.destroy_subject("acme", "bob")
        out.write("destroyed bob\n")
        keyring.destroy_expired(START_S + 400)
        out.write("expired all\n")


def _check(directory: Path, told: dict[str, str]) -> None:
    with _opened(directory) as keyring:
        if "destroyed" in told:
            assert keyring.aliases_of("acme", "bob") == []
        if "expired" in told:
            assert keyring.periods() == []
        # Once bob is gone what expired goes, aliases first; a kill may leave the rest.
        expiring = "destroyed" in told
        _check_rows(directory, keyring, expiring=expiring)
        known = {record.period_id.hex() for record in keyring.periods()}
        if known:
            for name in ("bob", "eve"):
                pairs = keyring.aliases_of("acme", name)
                aliases = [alias.hex() for _, alias in pairs]
                spared = not (expiring if name == "eve" else _began_destroying(told))
                assert aliases == [told[name]] if name in told and spared else len(aliases) <= 1
        assert not told.get("period") or told["period"] in known or _began_destroying(told)
        # Whatever is left can be used: a period, a subject, and its key for a job.
        record = keyring.ensure_period("acme", START_S)
        key = keyring.node_keys().subject("acme", "bob", record.period_id)
        assert keyring.job_keys().subject_key_for(key.alias, record.period_id) == key.key


def _check_rows(directory: Path, keyring: Keyring, *, expiring: bool) -> None:
    """No alias without its subject, nor the reverse unless keys expire; and every row opens."""
    connection = sqlite3.connect(directory / "keyring.db")
    rows = connection.execute("SELECT alias, period_id FROM aliases").fetchall()
    subjects = connection.execute("SELECT count(*) FROM subjects").fetchone()[0]
    connection.close()
    assert len(rows) == subjects or (expiring and len(rows) < subjects)
    for alias, period_id in rows:
        try:
            assert len(keyring.job_keys().subject_key_for(alias, period_id)) == 32
        except KeyDestroyedError as error:
            raise AssertionError("an alias outlived its subject") from error


def _began_destroying(told: dict[str, str]) -> bool:
    return "eve" in told


@contextmanager
def _opened(directory: Path) -> Iterator[Keyring]:
    keyring = Keyring.open(directory, retention=RETENTION, clock=lambda: START_S + 5.0)
    yield keyring
    keyring.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
