"""Destroyed means destroyed: by the API, by the clock, in every process, and on the disk."""

import hashlib
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from draftkeep.errors import ConflictError, KeyDestroyedError, StoreError
from draftkeep.policies.keyring import Keyring
from draftkeep.policies.keyring_db import KeyringDb

START_S = 1_800_000_000


def test_an_erased_subject_is_gone_and_comes_back_as_a_stranger(keyring: Keyring) -> None:
    node, job = keyring.node_keys(), keyring.job_keys()
    period_id = keyring.ensure_period("acme", START_S).period_id
    bob, eve = (node.subject("acme", name, period_id) for name in ("bob", "eve"))
    assert job.subject_key_for(bob.alias, period_id) == bob.key
    assert keyring.destroy_subject("acme", "bob") == 1
    assert keyring.destroy_subject("acme", "bob") == 0
    assert keyring.destroy_subject("nobody", "bob") == 0
    assert keyring.aliases_of("acme", "bob") == []
    with pytest.raises(KeyDestroyedError):
        job.subject_key_for(bob.alias, period_id)
    assert job.subject_key_for(eve.alias, period_id) == eve.key
    again = node.subject("acme", "bob", period_id)
    assert again.key != bob.key
    assert again.alias != bob.alias


def test_a_subject_seen_elsewhere_than_planned_is_not_destroyed(
    keyring: Keyring, tmp_path: Path
) -> None:
    node = keyring.node_keys()
    first, second = (keyring.ensure_period("acme", START_S + at).period_id for at in (0, 100))
    node.subject("acme", "bob", first)
    planned = keyring.aliases_of("acme", "bob")
    bob = node.subject("acme", "bob", second)
    db = KeyringDb(tmp_path / "keys", create=False)
    for too_few in ([], planned):
        with pytest.raises(ConflictError, match="plan again"):
            keyring.destroy_subject("acme", "bob", planned=too_few)
    assert keyring.job_keys().subject_key_for(bob.alias, second) == bob.key
    assert db.erasures() == 0
    db.close()
    planned.append((second, bob.alias))
    assert keyring.destroy_subject("acme", "bob", planned=planned) == 1
    assert keyring.destroy_subject("acme", "bob", planned=[]) == 0


def test_what_a_subject_was_called_in_an_ended_period_is_known_while_its_key_lives(
    keyring: Keyring, now_s: list[float]
) -> None:
    node = keyring.node_keys()
    first, second, third = (
        keyring.ensure_period("acme", START_S + at).period_id for at in (0, 100, 200)
    )
    early, late = (node.subject("acme", "bob", period_id) for period_id in (first, second))
    now_s[0] = START_S + 400.0
    keyring.destroy_expired(now_s[0])
    trail = keyring.trail_of("acme", "bob", [first, second])
    assert trail is not None
    assert trail.used == ((second, late.alias),)
    others = dict(trail.others)
    assert (set(others), others[first]) == ({first, third}, early.alias)
    assert keyring.trail_of("acme", "eve", [first]) is None
    assert keyring.trail_of("nobody", "bob", [first]) is None
    keyring.destroy_expired(START_S + 500)
    assert keyring.trail_of("acme", "bob", [first]) is None


def test_deadlines_destroy_periods_and_what_only_they_kept(
    keyring: Keyring, now_s: list[float]
) -> None:
    node, job = keyring.node_keys(), keyring.job_keys()
    first = keyring.ensure_period("acme", START_S).period_id
    second = keyring.ensure_period("acme", START_S + 100).period_id
    bob = node.subject("acme", "bob", first)
    node.subject("acme", "bob", second)
    eve = node.subject("acme", "eve", first)
    anonymous = node.subject("acme", None, first)
    assert keyring.destroy_expired(START_S + 399) == 0
    now_s[0] = START_S + 400.0
    for key in (bob, eve, anonymous):
        with pytest.raises(KeyDestroyedError, match="deadline"):
            job.subject_key_for(key.alias, first)
    assert keyring.destroy_expired(now_s[0]) == 3  # the period, eve, the anonymous callers
    assert keyring.period(first) is None
    assert [period_id for period_id, _ in keyring.aliases_of("acme", "bob")] == [second]
    assert keyring.aliases_of("acme", "eve") == []
    assert node.subject("acme", "bob", second).key == bob.key
    assert keyring.destroy_expired(START_S + 500) == 2
    assert keyring.aliases_of("acme", "bob") == []


def test_a_large_period_ends_in_many_commits_and_a_kill_between_them_changes_nothing(
    keyring: Keyring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = keyring.node_keys()
    first, second = (keyring.ensure_period("acme", START_S + at).period_id for at in (0, 100))
    for number in range(7):
        node.subject("acme", f"early-{number}", first)
        node.subject("acme", f"late-{number}", second)
    commits: list[int] = []
    write = KeyringDb.write

    @contextmanager
    def counted(self: KeyringDb) -> Iterator[sqlite3.Connection]:
        with write(self) as connection:
            yield connection
            commits.append(len(commits))

    def killed(self: KeyringDb) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("draftkeep.policies.keyring._CHUNK", 3)
    with monkeypatch.context() as patched:
        patched.setattr(KeyringDb, "erase", killed)
        with pytest.raises(KeyboardInterrupt):
            keyring.destroy_expired(START_S + 400)
    assert keyring.period(first) is not None
    assert keyring.aliases_of("acme", "early-0") == []
    for number in range(4):
        node.subject("acme", f"more-{number}", first)
    monkeypatch.setattr(KeyringDb, "write", counted)
    assert keyring.destroy_expired(START_S + 400) == 5
    # Two for four aliases, two for four subjects, and the period's own.
    assert len(commits) == 5
    assert keyring.period(first) is None
    connection = sqlite3.connect(tmp_path / "keys" / "keyring.db")
    assert connection.execute("SELECT DISTINCT period_id FROM aliases").fetchall() == [(second,)]
    connection.close()
    assert all(keyring.aliases_of("acme", f"late-{number}") for number in range(7))


def test_another_process_erasing_empties_the_caches_here(
    keyring: Keyring, open_keyring: Callable[..., Keyring], tmp_path: Path
) -> None:
    node, job = keyring.node_keys(), keyring.job_keys()
    period_id = keyring.ensure_period("acme", START_S).period_id
    bob = node.subject("acme", "bob", period_id)
    assert job.subject_key_for(bob.alias, period_id) == bob.key
    script = f"""
from pathlib import Path
from draftkeep.config import RetentionConfig
from draftkeep.policies.keyring import Keyring
retention = RetentionConfig(period_s=100, ttl_s=400)
keyring = Keyring.open(Path({str(tmp_path / "keys")!r}), retention=retention, clock=lambda: 1.8e9)
assert keyring.destroy_subject("acme", "bob") == 1
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    with pytest.raises(KeyDestroyedError):
        job.subject_key_for(bob.alias, period_id)
    assert node.subject("acme", "bob", period_id).key != bob.key


@pytest.mark.parametrize("count", [50, 1500])
def test_wrapped_bytes_leave_every_file(
    count: int, keyring: Keyring, tmp_path: Path, now_s: list[float]
) -> None:
    directory = tmp_path / "keys"
    node = keyring.node_keys()
    period_id = keyring.ensure_period("acme", START_S).period_id
    node.subject("acme", "bob", period_id)
    _insert_many(directory, count)
    doomed = _wrapped(directory)
    assert all(any(part in data for data in _files(directory)) for part in doomed)
    keyring.destroy_subject("acme", "bob")
    keyring.destroy_expired(START_S + 400)
    assert _wrapped(directory) == []
    assert not [part for part in doomed for data in _files(directory) if part in data]


def test_a_reader_with_the_file_open_is_in_nobodys_way(keyring: Keyring, tmp_path: Path) -> None:
    period_id = keyring.ensure_period("acme", START_S).period_id
    keyring.node_keys().subject("acme", "bob", period_id)
    directory = tmp_path / "keys"
    doomed = _wrapped(directory)
    script = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
print(connection.execute("SELECT count(*) FROM subjects").fetchone()[0], flush=True)
sys.stdin.readline()
print(connection.execute("SELECT count(*) FROM subjects").fetchone()[0], flush=True)
"""
    command = [sys.executable, "-c", script, str(directory / "keyring.db")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "1\n"
        keyring.destroy_subject("acme", "bob")
        assert not [part for part in doomed[:2] for data in _files(directory) if part in data]
        assert reader.communicate("\n", timeout=60)[0] == "0\n"


def test_a_reader_inside_a_transaction_is_reported_and_a_repetition_finishes(
    keyring: Keyring, open_keyring: Callable[..., Keyring], tmp_path: Path
) -> None:
    directory = tmp_path / "keys"
    period_id = keyring.ensure_period("acme", START_S).period_id
    bob = keyring.node_keys().subject("acme", "bob", period_id)
    reader = sqlite3.connect(directory / "keyring.db", isolation_level=None)
    reader.execute("BEGIN")
    wrapped = reader.execute("SELECT key_wrapped FROM subjects").fetchone()[0]
    db = KeyringDb(directory, create=False)
    with db.write() as connection:
        connection.execute("DELETE FROM subjects")
        connection.execute("UPDATE meta SET value = value + 1 WHERE name = 'erasures'")
    with pytest.raises(StoreError, match="read transaction"):
        db.scrub(tries=2)
    db.close()
    with pytest.raises(KeyDestroyedError):
        keyring.job_keys().subject_key_for(bob.alias, period_id)
    assert any(wrapped in data for data in _files(directory))
    open_keyring()  # opening does not stop at the reader
    reader.close()
    assert keyring.destroy_subject("acme", "bob") == 0
    assert not any(wrapped in data for data in _files(directory))


def test_a_damaged_row_can_still_be_erased(keyring: Keyring, tmp_path: Path) -> None:
    period_id = keyring.ensure_period("acme", START_S).period_id
    bob = keyring.node_keys().subject("acme", "bob", period_id)
    connection = sqlite3.connect(tmp_path / "keys" / "keyring.db")
    connection.execute("UPDATE subjects SET key_wrapped = zeroblob(60)")
    connection.commit()
    connection.close()
    with pytest.raises(StoreError, match="does not open"):
        keyring.job_keys().subject_key_for(bob.alias, period_id)
    assert keyring.destroy_subject("acme", "bob") == 1
    with pytest.raises(KeyDestroyedError):
        keyring.job_keys().subject_key_for(bob.alias, period_id)


def test_nothing_to_destroy_empties_no_cache(keyring: Keyring, tmp_path: Path) -> None:
    period_id = keyring.ensure_period("acme", START_S).period_id
    keyring.node_keys().subject("acme", "bob", period_id)
    db = KeyringDb(tmp_path / "keys", create=False)
    assert keyring.destroy_expired(START_S + 10) == keyring.destroy_subject("acme", "eve") == 0
    assert db.erasures() == 0
    keyring.destroy_subject("acme", "bob")
    assert db.erasures() == 1
    assert not db.scrub_pending()
    db.close()


def test_a_failing_write_changes_nothing_and_is_explained(keyring: Keyring, tmp_path: Path) -> None:
    record = keyring.ensure_period("acme", START_S)
    blocker = sqlite3.connect(tmp_path / "keys" / "keyring.db", isolation_level=None)
    blocker.execute(
        "CREATE TRIGGER full BEFORE INSERT ON aliases BEGIN SELECT RAISE(FAIL, 'disk is full'); END"
    )
    with pytest.raises(StoreError, match="disk is full"):
        keyring.node_keys().subject("acme", "bob", record.period_id)
    assert blocker.execute("SELECT count(*) FROM subjects").fetchone() == (0,)
    blocker.execute("DROP TRIGGER full")
    blocker.close()
    assert keyring.node_keys().subject("acme", "bob", record.period_id).kind == 1


def _insert_many(directory: Path, count: int) -> None:
    """Rows enough to split pages, all due to be destroyed with the first period."""
    connection = sqlite3.connect(directory / "keyring.db")
    rows = [
        (noise[:16], "acme", 1, noise[16:32], noise[4:], START_S, START_S + 400)
        for noise in (hashlib.sha512(bytes([i % 256, i // 256])).digest() for i in range(count))
    ]
    connection.executemany("INSERT INTO subjects VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
    connection.commit()
    connection.close()


def _wrapped(directory: Path) -> list[bytes]:
    """The end of every wrapped secret: the part of a deleted cell that is reused last."""
    connection = sqlite3.connect(directory / "keyring.db")
    rows = connection.execute(
        "SELECT key_wrapped FROM subjects UNION ALL SELECT pointer_wrapped FROM aliases "
        "UNION ALL SELECT private_wrapped FROM periods"
    ).fetchall()
    connection.close()
    return [row[0][-32:] for row in rows]


def _files(directory: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted(directory.glob("keyring.db*"))]
