import os
import stat
import threading
from pathlib import Path

import pytest

from draftkeep.errors import ConfigError, StoreError
from draftkeep.policies import secret_file
from draftkeep.policies.kek import LocalKek
from draftkeep.policies.signing import SigningKey, verify


def test_a_secret_file_is_made_once_and_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.kek"
    secret = secret_file.load_or_create(path)
    assert len(secret) == 32
    assert secret_file.load_or_create(path) == secret == path.read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert os.listdir(path.parent) == ["a.kek"]


def test_racing_creators_agree(tmp_path: Path) -> None:
    path, barrier, got = tmp_path / "a.kek", threading.Barrier(8), []

    def create() -> None:
        barrier.wait()
        got.append(secret_file.load_or_create(path))

    threads = [threading.Thread(target=create) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert set(got) == {path.read_bytes()}
    assert os.listdir(tmp_path) == ["a.kek"]


def test_a_missing_or_cut_file_is_named_but_not_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"period\.kek"):
        secret_file.load(tmp_path / "period.kek")
    (tmp_path / "cut.kek").write_bytes(b"\x11" * 31)
    with pytest.raises(ConfigError, match="31 bytes, expected 32") as raised:
        LocalKek.load(tmp_path / "cut.kek")
    assert "11" * 4 not in str(raised.value)


def test_a_signature_holds_for_its_message_and_key_only(tmp_path: Path) -> None:
    key = SigningKey.load_or_create(tmp_path / "issuer.key")
    signature = key.sign(b"message")
    assert verify(key.public, signature, b"message")
    assert SigningKey.load(tmp_path / "issuer.key").sign(b"message") == signature
    assert not verify(key.public, signature, b"massage")
    assert not verify(SigningKey(bytes(32)).public, signature, b"message")
    assert not verify(key.public[:-1], signature, b"message")
    assert not verify(key.public, signature[:-1], b"message")


def test_a_wrapped_key_opens_under_its_kek_and_context_only() -> None:
    kek = LocalKek(bytes(32))
    wrapped = kek.wrap(b"k" * 32, b"context")
    assert len(wrapped) == 12 + 32 + 16
    assert kek.unwrap(wrapped, b"context") == b"k" * 32
    assert kek.wrap(b"k" * 32, b"context") != wrapped
    cases = [
        (LocalKek(b"\x01" * 32), wrapped, b"context"),
        (kek, wrapped, b"Context"),
        (kek, wrapped[:-1], b"context"),
        (kek, b"", b"context"),
    ]
    for other, data, context in cases:
        with pytest.raises(StoreError, match="does not open"):
            other.unwrap(data, context)
