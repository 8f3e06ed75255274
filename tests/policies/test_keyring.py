"""What the keyring makes, and who may see it."""

import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from draftkeep.config import RetentionConfig
from draftkeep.errors import ConfigError, DeniedError, EnvelopeError, KeyDestroyedError, StoreError
from draftkeep.policies import names, period_keys
from draftkeep.policies.keyring import JobKeys, Keyring, NodeKeys

START_S = 1_800_000_000
Clock = Callable[[], float]


def test_a_period_is_made_once_signed_and_aligned(
    keyring: Keyring, open_keyring: Callable[..., Keyring]
) -> None:
    record = keyring.ensure_period("acme", START_S + 99)
    assert (record.start_s, record.destroy_at_s) == (START_S, START_S + 400)
    assert record.verify(keyring.issuer_public)
    assert not record.verify(bytes(32))
    assert open_keyring().ensure_period("acme", START_S) == record
    assert keyring.ensure_period("other", START_S) != record
    later = keyring.ensure_period("acme", START_S + 100)
    assert later.start_s == START_S + 100
    assert keyring.periods()[-1] == later
    assert keyring.period(record.period_id) == record
    private = keyring.job_keys().period_private_key(record.period_id)
    assert period_keys.public_of(private) == record.public_key


def test_a_period_past_its_deadline_is_not_made_again(keyring: Keyring, now_s: list[float]) -> None:
    keyring.ensure_period("acme", START_S)
    now_s[0] = START_S + 400
    with pytest.raises(KeyDestroyedError):
        keyring.ensure_period("acme", START_S)
    keyring.destroy_expired(now_s[0])
    with pytest.raises(KeyDestroyedError):
        keyring.ensure_period("acme", START_S)
    assert keyring.periods() == []


def test_a_shorter_ttl_redates_and_a_longer_one_does_not(
    keyring: Keyring,
    open_keyring: Callable[..., Keyring],
    retention: RetentionConfig,
    now_s: list[float],
) -> None:
    old = keyring.ensure_period("acme", START_S)
    keyring.node_keys().subject("acme", "bob", old.period_id)
    assert keyring.node_keys().period_at("acme", START_S) == old
    longer = open_keyring(RetentionConfig(period_s=100, ttl_s=1000))
    assert longer.period(old.period_id) == old
    assert longer.ensure_period("acme", START_S + 100).destroy_at_s == START_S + 1100
    short = RetentionConfig(period_s=50, ttl_s=200)
    assert open_keyring(short).period(old.period_id) != old
    redated = keyring.node_keys().period_at("acme", START_S)
    assert redated.destroy_at_s == START_S + 200
    assert redated.verify(keyring.issuer_public)
    now_s[0] = START_S + 200
    with pytest.raises(KeyDestroyedError):
        keyring.job_keys().period_private_key(old.period_id)
    assert keyring.destroy_expired(now_s[0]) == 2


def test_all_nodes_adopt_one_subject_key(
    keyring: Keyring, open_keyring: Callable[..., Keyring]
) -> None:
    period_id = keyring.ensure_period("acme", START_S).period_id
    views = [open_keyring().node_keys() for _ in range(4)]
    with ThreadPoolExecutor(8) as pool:
        got = list(
            pool.map(lambda i: views[i % 4].subject("acme", f"s{i % 5}", period_id), range(200))
        )
    assert len({(key.key, key.alias) for key in got}) == 5
    assert {key.kind for key in got} == {1}
    job = keyring.job_keys()
    assert all(job.subject_key_for(key.alias, period_id) == key.key for key in got)
    assert keyring.aliases_of("acme", "s3") == [(period_id, got[3].alias)]
    assert len({view.lookup_key("acme") for view in views}) == 1


def test_aliases_do_not_link_periods_tenants_or_subjects(keyring: Keyring) -> None:
    node = keyring.node_keys()
    first, second, other = (
        keyring.ensure_period(tenant, at_s).period_id
        for tenant, at_s in (("acme", START_S), ("acme", START_S + 100), ("other", START_S))
    )
    bob = node.subject("acme", "bob", first)
    bob_later = node.subject("acme", "bob", second)
    assert bob.key == bob_later.key
    assert bob.alias == names.alias(bob.key, "acme", first)
    everyone = [bob, bob_later, node.subject("acme", "eve", first)]
    everyone += [node.subject("other", "bob", other)]
    everyone += [node.subject("acme", None, first), node.subject("acme", None, second)]
    assert len({key.alias for key in everyone}) == 6
    assert len({key.key for key in everyone}) == 5
    assert [key.kind for key in everyone] == [1, 1, 1, 1, 0, 0]
    assert sorted(keyring.aliases_of("acme", "bob")) == sorted(
        [(first, bob.alias), (second, bob_later.alias)]
    )


def test_a_subject_needs_a_living_period_of_its_tenant(
    keyring: Keyring, now_s: list[float]
) -> None:
    node = keyring.node_keys()
    period_id = keyring.ensure_period("acme", START_S).period_id
    with pytest.raises(KeyDestroyedError):
        node.subject("other", "bob", period_id)
    with pytest.raises(KeyDestroyedError):
        node.subject("acme", "bob", bytes(16))
    node.subject("acme", "bob", period_id)
    now_s[0] = START_S + 400
    for subject in ("bob", None):
        with pytest.raises(KeyDestroyedError):
            node.subject("acme", subject, period_id)


def test_repeated_use_writes_nothing(keyring: Keyring, tmp_path: Path, now_s: list[float]) -> None:
    node = keyring.node_keys()
    period_id = keyring.ensure_period("acme", START_S).period_id
    first = node.subject("acme", "bob", period_id)
    size = (tmp_path / "keys" / "keyring.db-wal").stat().st_size
    for _ in range(50):
        assert node.subject("acme", "bob", period_id) == first
    now_s[0] += 61
    assert node.subject("acme", "bob", period_id) == first
    assert (tmp_path / "keys" / "keyring.db-wal").stat().st_size == size


def test_no_secret_and_no_name_lies_in_the_clear(keyring: Keyring, tmp_path: Path) -> None:
    node, job = keyring.node_keys(), keyring.job_keys()
    record = keyring.ensure_period("acme", START_S)
    subject = node.subject("acme", "bob@example.com", record.period_id)
    private = job.period_private_key(record.period_id)
    secrets = [subject.key, private[:32], private[64:], node.lookup_key("acme"), b"bob@"]
    files = [path for path in (tmp_path / "keys").iterdir() if path.name.startswith("keyring")]
    data = b"".join(path.read_bytes() for path in files)
    assert record.period_id in data
    assert not [secret for secret in secrets if secret in data]


def test_a_node_needs_no_period_kek_and_makes_no_period(
    keyring: Keyring, tmp_path: Path, clock: Clock, retention: RetentionConfig
) -> None:
    directory = tmp_path / "keys"
    made = keyring.ensure_period("acme", START_S)
    for name in ("period.kek", "issuer.key"):
        (directory / name).unlink()
    node = NodeKeys.open(directory, retention=retention, clock=clock)
    assert node.period_at("acme", START_S + 5) == made
    subject = node.subject("acme", "bob", made.period_id)
    assert keyring.job_keys().subject_key_for(subject.alias, made.period_id) == subject.key
    with pytest.raises(DeniedError, match="no signed period"):
        node.period_at("acme", START_S + 100)
    assert not hasattr(node, "period_private_key")
    with pytest.raises(ConfigError, match=r"period\.kek"):
        JobKeys.open(directory, clock=clock)
    node.close()


def test_a_job_opens_with_both_keks(keyring: Keyring, tmp_path: Path, clock: Clock) -> None:
    record = keyring.ensure_period("acme", START_S)
    subject = keyring.node_keys().subject("acme", None, record.period_id)
    (tmp_path / "keys" / "issuer.key").unlink()
    job = JobKeys.open(tmp_path / "keys", clock=clock)
    assert job.period(record.period_id) == record
    assert job.subject_key_for(subject.alias, record.period_id) == subject.key
    with pytest.raises(KeyDestroyedError):
        job.subject_key_for(bytes(16), record.period_id)
    with pytest.raises(KeyDestroyedError):
        job.period_private_key(bytes(16))
    job.close()


def test_a_share_opens_for_its_node_alone_and_while_its_period_lives(
    keyring: Keyring, now_s: list[float]
) -> None:
    record = keyring.ensure_period("acme", START_S)
    job, share, info = keyring.job_keys(), b"s" * period_keys.SHARE_BYTES, b"a node"
    sealed = period_keys.seal_share(record.public_key, share, info)
    for _ in range(2):
        assert job.at(record.period_id).share(sealed, info) == share
        with pytest.raises(EnvelopeError):
            job.at(record.period_id).share(sealed, b"another node")
    later = keyring.ensure_period("acme", START_S + 100)
    with pytest.raises(EnvelopeError):
        job.at(later.period_id).share(sealed, info)
    now_s[0] = record.destroy_at_s
    with pytest.raises(KeyDestroyedError):
        job.at(record.period_id)
    assert keyring.destroy_expired(now_s[0]) > 0
    now_s[0] = START_S
    with pytest.raises(KeyDestroyedError):
        job.at(record.period_id)


def test_an_altered_record_is_not_used(
    keyring: Keyring, open_keyring: Callable[..., Keyring], tmp_path: Path
) -> None:
    record = keyring.ensure_period("acme", START_S)
    connection = sqlite3.connect(tmp_path / "keys" / "keyring.db")
    connection.execute("UPDATE periods SET destroy_at_s = destroy_at_s + 1")
    connection.commit()
    connection.close()
    with pytest.raises(StoreError, match="signature"):
        keyring.node_keys().period_at("acme", START_S)
    with pytest.raises(StoreError, match="signature"):
        keyring.job_keys().period_private_key(record.period_id)


@pytest.mark.parametrize("name", ["period.kek", "subject.kek", "issuer.key"])
def test_a_lost_secret_file_is_not_replaced_silently(
    name: str, open_keyring: Callable[..., Keyring], tmp_path: Path
) -> None:
    open_keyring().ensure_period("acme", START_S)
    (tmp_path / "keys" / name).unlink()
    with pytest.raises(StoreError, match=r"KEK|issuer"):
        open_keyring()


def test_a_newer_schema_no_keyring_and_no_database_are_explained(
    keyring: Keyring,
    open_keyring: Callable[..., Keyring],
    tmp_path: Path,
    clock: Clock,
    retention: RetentionConfig,
) -> None:
    with pytest.raises(ConfigError, match=r"no keyring\.db"):
        NodeKeys.open(tmp_path, retention=retention, clock=clock)
    connection = sqlite3.connect(tmp_path / "keys" / "keyring.db")
    connection.execute("UPDATE meta SET value = 2 WHERE name = 'schema'")
    connection.commit()
    connection.close()
    with pytest.raises(StoreError, match="schema version 2"):
        open_keyring()
    keyring.close()
    for path in (tmp_path / "keys").glob("keyring.db*"):
        path.unlink()
    (tmp_path / "keys" / "keyring.db").write_bytes(b"not a database" * 100)
    with pytest.raises(StoreError, match="is a keyring"):
        open_keyring()
