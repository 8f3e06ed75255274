"""A second reader of the sealed formats, written from docs/formats.md alone.

Names, header, period record, log record and envelope. Its neighbours read the body
(reader_body.py), redo noise, processor and replay (reader_draws.py), and open shards and drafter
directories (reader_files.py). None of them imports draftkeep.
"""

import hashlib
import hmac
from collections.abc import Callable
from dataclasses import astuple, dataclass

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from tests.formats.reader_cbor import CborItem, FormatError, cbor_decode, cbor_encode, require

MAX_RECORD_BYTES = 900_000
HEADER_FIELDS = 22
SUITE_ID = bytes.fromhex("48504b45647a00010002")
KEM_CIPHERTEXT_BYTES = 1088
ENCAPSULATION_BYTES = 1168
XWING_LABEL = bytes.fromhex("5c2e2f2f5e5c")


def lp(data: bytes) -> bytes:
    """The length in 4 bytes, big-endian, then the data."""
    return len(data).to_bytes(4, "big") + data


def hmac_sha256(key: bytes, message: bytes) -> bytes:
    """HMAC-SHA-256, key first."""
    return hmac.digest(key, message, "sha256")


def hkdf_expand(prk: bytes, info: bytes, length: int) -> bytes:
    """HKDF-Expand over SHA-256."""
    return HKDFExpand(SHA256(), length, info).derive(prk)


# Names that do not link


def alias(subject_key: bytes, tenant: str, period_id: bytes) -> bytes:
    """What stands for the subject in this period."""
    message = b"draftkeep/v1/alias" + lp(tenant.encode()) + lp(period_id)
    return hmac_sha256(subject_key, message)[:16]


def subject_tag(lookup_key: bytes, name: str) -> bytes:
    """What finds a subject's row in the keyring."""
    return hmac_sha256(lookup_key, b"draftkeep/v1/subject" + name.encode())


def request_id(lookup_key: bytes, response_id: bytes) -> bytes:
    """The request id behind the id that the caller saw."""
    return hmac_sha256(lookup_key, b"draftkeep/v1/request" + response_id)[:16]


def held_out(lookup_key: bytes, who: str | bytes) -> bool:
    """The held-out bit: of a subject name, or of the request id of an anonymous caller."""
    tail = who.encode() if isinstance(who, str) else who
    draw = hmac_sha256(lookup_key, b"draftkeep/v1/heldout" + tail)
    return 10 * int.from_bytes(draw[:8], "big") < 2**64


def share_id(encapsulation: bytes) -> bytes:
    """Which encapsulation a header means."""
    return hashlib.sha256(encapsulation).digest()[:16]


# Header


@dataclass(frozen=True)
class Header:
    """The 22 fields in encoding order."""

    version: int
    trace_id: bytes
    request_id: bytes
    tenant: str
    period_id: bytes
    alias: bytes
    subject_kind: int
    share_id: bytes
    target: bytes
    tokenizer: bytes
    node: str
    created_s: int
    expiry_s: int
    consent: int
    policy_version: int
    origin: int
    parent_trace_id: bytes | None
    domain: str | None
    prompt_tokens: int
    positions: int
    body_bytes: int
    ext: bytes


def _whole(item: CborItem) -> bool:
    return isinstance(item, int) and 0 <= item < 2**63


def _below(limit: int) -> Callable[[CborItem], bool]:
    return lambda item: isinstance(item, int) and 0 <= item < limit


def _binary(size: int) -> Callable[[CborItem], bool]:
    return lambda item: isinstance(item, bytes) and len(item) == size


def _text(item: CborItem) -> bool:
    return isinstance(item, str) and item != ""


_HEADER_CHECKS: tuple[Callable[[CborItem], bool], ...] = (
    lambda item: item == 1,
    _binary(16),
    _binary(16),
    _text,
    _binary(16),
    _binary(16),
    _below(2),
    _binary(16),
    _binary(32),
    _binary(32),
    _text,
    _whole,
    _whole,
    _below(3),
    _whole,
    _below(3),
    lambda item: item is None or _binary(16)(item),
    lambda item: item is None or isinstance(item, str),
    _whole,
    _whole,
    _whole,
    lambda item: isinstance(item, bytes),
)


def decode_header(data: bytes) -> Header:
    """The checked header in its encoded bytes."""
    items = cbor_decode(data)
    require(bool(items) and items[0] == 1, "unknown header version")
    require(len(items) == HEADER_FIELDS, "not 22 items")
    for number, (item, check) in enumerate(zip(items, _HEADER_CHECKS, strict=True)):
        require(check(item), f"header item {number} is not what it must be")
    header = Header(*items)  # type: ignore[arg-type]
    require(header.expiry_s > header.created_s, "expiry is not above created")
    return header


def encode_header(header: Header) -> bytes:
    """The bytes of a header, as signature and seal need them."""
    return cbor_encode(astuple(header))


# Log record and envelope


@dataclass(frozen=True)
class Record:
    """The six parts of a log record, the header still encoded."""

    header: bytes
    nonce: bytes
    ciphertext: bytes
    commitment: bytes
    signature: bytes
    encapsulation: bytes


def decode_record(data: bytes) -> Record:
    """A log record, split."""
    require(len(data) <= MAX_RECORD_BYTES, "the record is too long")
    require(data[:1] == b"\x01", "unknown record version")
    parts: list[bytes] = []
    at = 1
    for _ in range(6):
        size = int.from_bytes(data[at : at + 4], "big")
        require(at + 4 + size <= len(data), "the record ends early")
        parts.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    require(at == len(data), "bytes after the record")
    record = Record(*parts)
    require(len(record.nonce) == 12, "the nonce is not 12 bytes")
    require(len(record.commitment) == 32, "the commitment is not 32 bytes")
    require(len(record.signature) == 64, "the signature is not 64 bytes")
    require(
        len(record.encapsulation) == ENCAPSULATION_BYTES, "the encapsulation is not 1,168 bytes"
    )
    return record


def check_signature(public: bytes, signature: bytes, message: bytes) -> None:
    """Refuse unless the Ed25519 signature is right."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except InvalidSignature as problem:
        raise FormatError("the signature is wrong") from problem


def check_node_signature(record: Record, node_public: bytes) -> None:
    """Refuse unless the node signed this record."""
    digest = hashlib.sha256(
        lp(record.header) + record.nonce + record.ciphertext + record.commitment
    ).digest()
    check_signature(node_public, record.signature, b"draftkeep/v1/sig" + digest)


@dataclass(frozen=True)
class PeriodRecord:
    """What a gateway states about a period's key."""

    tenant: str
    period_id: bytes
    start_s: int
    destroy_at_s: int
    public_key: bytes
    signature: bytes

    def signed_bytes(self) -> bytes:
        """What the issuer signs."""
        return (
            b"draftkeep/v1/period"
            + lp(self.tenant.encode())
            + lp(self.period_id)
            + self.start_s.to_bytes(8, "big")
            + self.destroy_at_s.to_bytes(8, "big")
            + lp(self.public_key)
        )


def check_period_record(record: PeriodRecord, issuer_public: bytes) -> None:
    """Refuse unless the issuer signed this period record."""
    check_signature(issuer_public, record.signature, record.signed_bytes())


def public_key(period_private: bytes) -> bytes:
    """The public half of a period's key: encapsulation key, then X25519 point."""
    kem = MLKEM768PrivateKey.from_seed_bytes(period_private[:64]).public_key()
    curve = X25519PrivateKey.from_private_bytes(period_private[64:]).public_key()
    return kem.public_bytes(Encoding.Raw, PublicFormat.Raw) + curve.public_bytes_raw()


def share_info(tenant: str, period_id: bytes, node: str) -> bytes:
    """HPKE's info for a node share."""
    names = lp(tenant.encode()) + lp(period_id) + lp(node.encode())
    return b"draftkeep/v1/share" + lp(SUITE_ID) + names


def _labeled_extract(salt: bytes, label: bytes, ikm: bytes) -> bytes:
    return hmac_sha256(salt, b"HPKE-v1" + SUITE_ID + label + ikm)


def _labeled_expand(prk: bytes, label: bytes, x: bytes, length: int) -> bytes:
    info = length.to_bytes(2, "big") + b"HPKE-v1" + SUITE_ID + label + x
    return hkdf_expand(prk, info, length)


def open_share(period_private: bytes, encapsulation: bytes, info: bytes) -> bytes:
    """The node share, by HPKE in full."""
    require(len(period_private) == 96, "the private key is not 96 bytes")
    require(len(encapsulation) == ENCAPSULATION_BYTES, "the encapsulation is not 1,168 bytes")
    kem = MLKEM768PrivateKey.from_seed_bytes(period_private[:64])
    curve = X25519PrivateKey.from_private_bytes(period_private[64:])
    point = encapsulation[KEM_CIPHERTEXT_BYTES : KEM_CIPHERTEXT_BYTES + 32]
    ss_m = kem.decapsulate(encapsulation[:KEM_CIPHERTEXT_BYTES])
    ss_x = curve.exchange(X25519PublicKey.from_public_bytes(point))
    own = curve.public_key().public_bytes_raw()
    ss = hashlib.sha3_256(ss_m + ss_x + point + own + XWING_LABEL).digest()
    zero = bytes(32)
    psk_id_hash = _labeled_extract(zero, b"psk_id_hash", b"")
    context = b"\x00" + psk_id_hash + _labeled_extract(zero, b"info_hash", info)
    secret = _labeled_extract(ss, b"secret", b"")
    key = _labeled_expand(secret, b"key", context, 32)
    nonce = _labeled_expand(secret, b"base_nonce", context, 12)
    return gcm_open(key, nonce, encapsulation[-48:], b"")


def gcm_open(key: bytes, nonce: bytes, ciphertext: bytes, associated: bytes) -> bytes:
    """AES-256-GCM, the tag last."""
    try:
        return AESGCM(key).decrypt(nonce, ciphertext, associated)
    except InvalidTag as problem:
        raise FormatError("the ciphertext is not authentic") from problem


def content_keys(share: bytes, subject_key: bytes, header: bytes) -> tuple[bytes, bytes]:
    """Content key and commitment."""
    prk = hmac_sha256(share, b"draftkeep/v1/mix" + subject_key)
    trace_id = decode_header(header).trace_id
    info = b"draftkeep/v1/trace" + trace_id + hashlib.sha256(header).digest()
    okm = hkdf_expand(prk, info, 64)
    return okm[:32], okm[32:]


def open_envelope(record: Record, period_private: bytes, subject_key: bytes) -> bytes:
    """The plaintext body, still packed. The signature is checked apart, before."""
    header = decode_header(record.header)
    require(share_id(record.encapsulation) == header.share_id, "another share's encapsulation")
    require(len(record.ciphertext) == header.body_bytes + 16, "the body has another length")
    expected = alias(subject_key, header.tenant, header.period_id)
    require(hmac.compare_digest(expected, header.alias), "another subject's key")
    info = share_info(header.tenant, header.period_id, header.node)
    share = open_share(period_private, record.encapsulation, info)
    key, commitment = content_keys(share, subject_key, record.header)
    require(hmac.compare_digest(commitment, record.commitment), "the commitment is wrong")
    return gcm_open(key, record.nonce, record.ciphertext, record.header)


def check_period(header: Header, period: PeriodRecord, now_s: float) -> None:
    """Refuse where header and period record disagree or the deadline has passed by the clock."""
    require(header.period_id == period.period_id, "another period")
    require(header.tenant == period.tenant, "another tenant's period")
    require(header.created_s >= period.start_s, "created before its period")
    require(now_s < min(header.expiry_s, period.destroy_at_s), "the deadline has passed")
