"""The clear header of a sealed trace: what routing, retention and audit need, and nothing else.

One canonical byte encoding (deterministic CBOR, RFC 8949 section 4.2): an array of the fields in
the order below. The same fields are a shard's typed columns and encode back bit for bit.
"""

from dataclasses import dataclass, fields
from typing import Any

import cbor2

from draftkeep.errors import EnvelopeError

HEADER_VERSION = 1

# Exact lengths of the byte-string fields, as in docs/formats.md.
_LENGTHS = {
    "trace_id": 16,
    "request_id": 16,
    "period_id": 16,
    "alias": 16,
    "share_id": 16,
    "target": 32,
    "tokenizer": 32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """Header version 1, in encoding order.

    `created_s` and `expiry_s` are Unix seconds. `subject_kind`: 0 anonymous, 1 named. `consent`:
    0 tenant, 1 pool, 2 everyone. `origin`: 0 served, 1 relabelled, 2 tap. `domain` is None where
    the tenant hides it. `body_bytes` is the length of the plaintext body. `ext` is empty in v1
    and kept verbatim.
    """

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

    def encode(self) -> bytes:
        """The one canonical encoding of this header."""
        return cbor2.dumps([getattr(self, name) for name in FIELD_NAMES], canonical=True)


FIELD_NAMES = tuple(field.name for field in fields(Header))


def decode_header(data: bytes) -> Header:
    """Read a header; raises EnvelopeError unless `data` is the canonical encoding of one."""
    try:
        values = cbor2.loads(data)
    except (cbor2.CBORDecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise EnvelopeError(
            f"header is not CBOR ({type(error).__name__}); drop the record"
        ) from None
    if not isinstance(values, list) or not values:
        raise EnvelopeError("header is not a CBOR array; drop the record")
    if type(values[0]) is not int:
        raise EnvelopeError("header begins with no version number; drop the record")
    if values[0] != HEADER_VERSION:
        raise EnvelopeError(
            f"header version {values[0]}, expected {HEADER_VERSION}; "
            "quarantine the record until a reader of that version is installed"
        )
    if len(values) != len(FIELD_NAMES):
        raise EnvelopeError(f"header has {len(values)} fields, expected {len(FIELD_NAMES)}")
    header = Header(**dict(zip(FIELD_NAMES, values, strict=True)))
    _check(header)
    if header.encode() != data:
        raise EnvelopeError("header is not in canonical encoding; drop the record")
    return header


def _check(header: Header) -> None:
    for field in fields(Header):
        value: Any = getattr(header, field.name)
        if not _right_type(field.name, value):
            raise EnvelopeError(f"header field {field.name} has the wrong type or length")
    if header.subject_kind not in (0, 1) or header.consent not in (0, 1, 2):
        raise EnvelopeError("header subject kind or consent ceiling is out of range")
    if header.origin not in (0, 1, 2):
        raise EnvelopeError("header origin is out of range")
    if header.expiry_s <= header.created_s:
        raise EnvelopeError("header expires before it was created")


def _right_type(name: str, value: Any) -> bool:
    if name == "parent_trace_id":
        return value is None or (isinstance(value, bytes) and len(value) == 16)
    if name == "domain":
        return value is None or isinstance(value, str)
    if name in ("tenant", "node"):
        return isinstance(value, str) and bool(value)
    if name == "ext":
        return isinstance(value, bytes)
    if name in _LENGTHS:
        return isinstance(value, bytes) and len(value) == _LENGTHS[name]
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
