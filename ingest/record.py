"""SealedTrace, what its node signs, and the bytes that stand for it in a log."""

import hashlib
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal

from draftkeep.errors import EnvelopeError
from draftkeep.ingest.header import HEADER_VERSION, Header, decode_header, is_sound
from draftkeep.policies import signing
from draftkeep.policies.names import ID_BYTES, lp
from draftkeep.policies.period_keys import ENCAPSULATION_BYTES
from draftkeep.policies.signing import SIGNATURE_BYTES

RECORD_VERSION = 1
MAX_RECORD_BYTES = 900_000
NONCE_BYTES = 12
TAG_BYTES = 16
COMMITMENT_BYTES = 32
# What the seal of one trace adds to its body, the header and the shared encapsulation aside.
ENVELOPE_BYTES = NONCE_BYTES + TAG_BYTES + COMMITMENT_BYTES + SIGNATURE_BYTES
# What a record spends beside header and body.
RECORD_OVERHEAD_BYTES = 1 + 6 * 4 + ENVELOPE_BYTES + ENCAPSULATION_BYTES
# A node's traces of a period share one encapsulation, which is no secret.
_SHARES = 1024
# How a record begins in front of its trace id, the header's length aside: that is the header's
# CBOR array of 22, its version and a byte string of 16.
_HEADER_AT = 1 + 4
_TRACE_ID_HEAD = bytes([0x96, HEADER_VERSION, 0x40 + ID_BYTES])
_TRACE_ID_AT = _HEADER_AT + len(_TRACE_ID_HEAD)
_FIELDS = ("header", "nonce", "ciphertext", "commitment", "signature", "encapsulation")
# Of nonce, commitment, signature and encapsulation.
_LENGTHS = (NONCE_BYTES, COMMITMENT_BYTES, SIGNATURE_BYTES, ENCAPSULATION_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SealedTrace:
    """One trace under its seal. Everything but `ciphertext` says nothing about content.

    `header` is the canonical encoding; `nonce` 12 bytes, `ciphertext` body and 16-byte tag,
    `commitment` 32, `signature` 64 (Ed25519 of the node), `encapsulation` 1,168 (the node share
    under the period's public key, the same for all traces with one share id). EnvelopeError where
    a length is off.
    """

    header: bytes
    nonce: bytes
    ciphertext: bytes
    commitment: bytes
    signature: bytes
    encapsulation: bytes
    # Not given at construction, so that a copy with another header does not keep this one's.
    _parsed: Header | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        got = len(self.nonce), len(self.commitment), len(self.signature), len(self.encapsulation)
        if got != _LENGTHS:
            raise EnvelopeError(
                "sealed trace: nonce, commitment, signature and encapsulation have "
                f"{got} bytes, expected {_LENGTHS}"
            )
        if len(self.ciphertext) < TAG_BYTES:
            raise EnvelopeError("sealed trace: the ciphertext is shorter than its tag")

    @property
    def parsed(self) -> Header:
        """The header's fields; EnvelopeError where `header` is not one in canonical encoding."""
        return self._parsed or decode_header(self.header)

    @classmethod
    def under(
        cls,
        header: Header,
        *,
        nonce: bytes,
        ciphertext: bytes,
        commitment: bytes,
        signature: bytes,
        encapsulation: bytes,
    ) -> "SealedTrace":
        """A trace whose header is at hand: it is encoded once and, where sound, never decoded."""
        sealed = cls(
            header=header.encode(),
            nonce=nonce,
            ciphertext=ciphertext,
            commitment=commitment,
            signature=signature,
            encapsulation=encapsulation,
        )
        if is_sound(header):
            object.__setattr__(sealed, "_parsed", header)
        return sealed


@lru_cache(maxsize=_SHARES)
def share_id(encapsulation: bytes) -> bytes:
    """SHA-256 of the encapsulation, its first 16 bytes."""
    return hashlib.sha256(encapsulation).digest()[:ID_BYTES]


def misfit(
    sealed: SealedTrace, header: Header
) -> Literal["share_mismatch", "length_mismatch"] | None:
    """What the sealed trace's header says wrongly of the rest: its share id or its body length.

    None where both are right. The signature does not cover the encapsulation, hence the first.
    """
    if header.share_id != share_id(sealed.encapsulation):
        return "share_mismatch"
    if header.body_bytes != len(sealed.ciphertext) - TAG_BYTES:
        return "length_mismatch"
    return None


def signed_message(header: bytes, nonce: bytes, ciphertext: bytes, commitment: bytes) -> bytes:
    """What the node signs. The encapsulation is covered through the header's share id."""
    digest = hashlib.sha256(lp(header) + nonce)
    digest.update(ciphertext)
    digest.update(commitment)
    return b"draftkeep/v1/sig" + digest.digest()


def verify_signature(sealed: SealedTrace, public: bytes) -> bool:
    """Whether the node with this Ed25519 public key sealed exactly this trace. Needs no secret."""
    message = signed_message(sealed.header, sealed.nonce, sealed.ciphertext, sealed.commitment)
    return signing.verify(public, sealed.signature, message)


def encode_record(sealed: SealedTrace) -> bytes:
    """The log record, version 1: byte 0x01, then lp of the six fields in `SealedTrace` order.

    lp(x) is the length as 4 bytes big-endian, then x. EnvelopeError over 900,000 bytes.
    """
    record = bytes([RECORD_VERSION]) + b"".join(lp(getattr(sealed, name)) for name in _FIELDS)
    if len(record) > MAX_RECORD_BYTES:
        raise EnvelopeError(
            f"a record of {len(record)} bytes, at most {MAX_RECORD_BYTES} allowed; leave out "
            "rejected branches or cut positions before sealing"
        )
    return record


def decode_record(data: bytes) -> SealedTrace:
    """The sealed trace in a log record; EnvelopeError unless the bytes are exactly one record.

    A record of another version is left as it is: it is not corrupt, only not for this reader.
    """
    return read_record(data)[0]


def read_record(data: bytes) -> tuple[SealedTrace, Header]:
    """`decode_record`, and the header it had to decode for that."""
    if not data:
        raise EnvelopeError("an empty log record; drop it")
    if data[0] != RECORD_VERSION:
        raise EnvelopeError(
            f"unknown log record version {data[0]}, this reader knows {RECORD_VERSION}; keep the "
            "record in quarantine until a newer release reads it"
        )
    if len(data) > MAX_RECORD_BYTES:
        raise EnvelopeError(f"a record of {len(data)} bytes, at most {MAX_RECORD_BYTES} allowed")
    fields: dict[str, bytes] = {}
    at, size = 1, len(data)
    for name in _FIELDS:
        start = at + 4
        at = start + int.from_bytes(data[at:start], "big")
        if start > size or at > size:
            raise EnvelopeError(f"a log record ends inside its field {name}; drop it")
        fields[name] = bytes(data[start:at])
    if at != size:
        raise EnvelopeError(f"a log record goes on for {size - at} bytes after its last field")
    sealed = SealedTrace(**fields)
    return sealed, decode_header(sealed.header)


def peek_trace_id(data: bytes) -> bytes | None:
    """The trace id of what begins like a record; None elsewhere. Says nothing of the rest."""
    if data[:1] != bytes([RECORD_VERSION]) or data[_HEADER_AT:_TRACE_ID_AT] != _TRACE_ID_HEAD:
        return None
    trace_id = data[_TRACE_ID_AT : _TRACE_ID_AT + ID_BYTES]
    return trace_id if len(trace_id) == ID_BYTES else None
