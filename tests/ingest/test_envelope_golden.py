"""A frozen sealed trace opens, by the code and by the definitions written out a second time."""

import hashlib
import hmac
import json
import sqlite3
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from draftkeep.config import RetentionConfig
from draftkeep.errors import KeyDestroyedError
from draftkeep.ingest import envelope
from draftkeep.ingest.envelope import Opener
from draftkeep.ingest.record import decode_record, share_id
from draftkeep.policies import names, period_keys
from draftkeep.policies.kek import LocalKek
from draftkeep.policies.keyring import Keyring

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "envelope-v1.json").read_text(encoding="utf-8")
)
INPUTS = {
    name: bytes.fromhex(value) for name, value in GOLDEN["inputs"].items() if name != "subject_name"
}
ENVELOPE = {name: bytes.fromhex(value) for name, value in GOLDEN["envelope"].items()}
HEADER = bytes.fromhex(GOLDEN["header_bytes"])
PERIOD = GOLDEN["period"]
PERIOD_ID = bytes.fromhex(PERIOD["period_id"])


@pytest.fixture
def keyring(tmp_path: Path) -> Iterator[Keyring]:
    """A keyring that holds the golden keys, under an issuer with the golden seed."""
    (tmp_path / "issuer.key").write_bytes(INPUTS["issuer_seed"])
    keyring = Keyring.open(
        tmp_path, retention=RetentionConfig(), clock=lambda: PERIOD["start_s"] + 500.0
    )
    period_kek, subject_kek = (
        LocalKek.load(tmp_path / name) for name in ("period.kek", "subject.kek")
    )
    tenant, alias = names.lp(b"acme"), bytes.fromhex(GOLDEN["names"]["alias"])
    tag, row_id = bytes.fromhex(GOLDEN["names"]["subject_tag"]), bytes(16)
    context = b"draftkeep/v1/wrap/period" + tenant + names.lp(PERIOD_ID)
    private = period_kek.wrap(INPUTS["period_private"], context)
    context = b"draftkeep/v1/wrap/subject" + tenant + b"\x01" + names.lp(tag)
    subject = subject_kek.wrap(INPUTS["subject_key"], context)
    context = b"draftkeep/v1/wrap/alias" + names.lp(alias) + names.lp(PERIOD_ID)
    pointer = subject_kek.wrap(row_id, context)
    times = (PERIOD["start_s"], PERIOD["destroy_at_s"])
    public = (bytes.fromhex(PERIOD["public_key"]), bytes.fromhex(PERIOD["signature"]))
    with sqlite3.connect(tmp_path / "keyring.db") as connection:
        connection.execute(
            "INSERT INTO periods VALUES (?, ?, ?, ?, ?, ?, ?)",
            (PERIOD_ID, "acme", *times, *public, private),
        )
        connection.execute(
            "INSERT INTO subjects VALUES (?, ?, ?, ?, ?, ?, ?)",
            (row_id, "acme", 1, tag, subject, *times),
        )
        connection.execute("INSERT INTO aliases VALUES (?, ?, ?)", (alias, PERIOD_ID, pointer))
    connection.close()
    yield keyring
    keyring.close()


def test_the_frozen_record_opens(keyring: Keyring) -> None:
    sealed = decode_record(bytes.fromhex(GOLDEN["record"]))
    node_public = {"node-1": INPUTS["node_public"]}.get
    opener = Opener(keyring.job_keys(), node_public, clock=lambda: PERIOD["start_s"] + 500.0)
    assert opener.open(sealed) == INPUTS["body"]
    late = Opener(keyring.job_keys(), node_public, clock=lambda: float(PERIOD["destroy_at_s"]))
    with pytest.raises(KeyDestroyedError):
        late.open(sealed)


def test_frozen_intermediate_values() -> None:
    info = envelope.share_info("acme", PERIOD_ID, "node-1")
    assert info == ENVELOPE["share_info"]
    assert ENVELOPE["suite_id"] == period_keys.SUITE_ID
    share = period_keys.open_share(INPUTS["period_private"], ENVELOPE["encapsulation"], info)
    assert share == INPUTS["share"]
    assert share_id(ENVELOPE["encapsulation"]) == ENVELOPE["share_id"]
    trace_id = bytes.fromhex(GOLDEN["header"]["trace_id"])
    derived = envelope.content_key(share, INPUTS["subject_key"], trace_id, HEADER)
    assert derived == (ENVELOPE["content_key"], ENVELOPE["commitment"])
    sealed = decode_record(bytes.fromhex(GOLDEN["record"]))
    assert envelope.verify_signature(sealed, INPUTS["node_public"])
    flipped = bytes([sealed.signature[0] ^ 1]) + sealed.signature[1:]
    assert not envelope.verify_signature(replace(sealed, signature=flipped), INPUTS["node_public"])


def test_the_definitions_written_out() -> None:
    """HMAC, SHA-256, AES-GCM and Ed25519 only; nothing of the code under test."""
    trace_id = bytes.fromhex(GOLDEN["header"]["trace_id"])
    prk = _mac(INPUTS["share"], b"draftkeep/v1/mix" + INPUTS["subject_key"])
    info = b"draftkeep/v1/trace" + trace_id + hashlib.sha256(HEADER).digest()
    key = _mac(prk, info + b"\x01")
    commitment = _mac(prk, key + info + b"\x02")
    assert commitment == ENVELOPE["commitment"]
    nonce, ciphertext = INPUTS["nonce"], ENVELOPE["ciphertext"]
    assert AESGCM(key).decrypt(nonce, ciphertext, HEADER) == INPUTS["body"]
    framed = len(HEADER).to_bytes(4, "big") + HEADER
    digest = hashlib.sha256(framed + nonce + ciphertext + commitment).digest()
    Ed25519PublicKey.from_public_bytes(INPUTS["node_public"]).verify(
        ENVELOPE["signature"], b"draftkeep/v1/sig" + digest
    )


def _mac(key: bytes, message: bytes) -> bytes:
    return hmac.new(key, message, hashlib.sha256).digest()
