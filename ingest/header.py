"""The clear header of a sealed trace: what routing, retention and audit need, and nothing else.

One canonical byte encoding (deterministic CBOR, RFC 8949 section 4.2): an array of the fields in
the order below. The same fields are a shard's typed columns and encode back bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from types import NoneType
from typing import Any

import cbor2

from draftkeep.errors import EnvelopeError

HEADER_VERSION = 1


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
        return _encoded(_values(self))


FIELD_NAMES = tuple(field.name for field in fields(Header))
_values = attrgetter(*FIELD_NAMES)
# How a field is set behind the back of a frozen class: a third of the time that its own __init__
# takes, and every trace that is read has a header.
_PUTS = tuple(getattr(Header, name).__set__ for name in FIELD_NAMES)

# What a field may hold, as in docs/formats.md: of which types exactly (so that true is no number),
# from which to which length or value.
_ANY = 2**63 - 1
_TEXT = 255
_KINDS: dict[str, tuple[tuple[type, ...], int, int]] = {
    "trace_id": ((bytes,), 16, 16),
    "request_id": ((bytes,), 16, 16),
    "tenant": ((str,), 1, _TEXT),
    "period_id": ((bytes,), 16, 16),
    "alias": ((bytes,), 16, 16),
    "share_id": ((bytes,), 16, 16),
    "target": ((bytes,), 32, 32),
    "tokenizer": ((bytes,), 32, 32),
    "node": ((str,), 1, _TEXT),
    "parent_trace_id": ((bytes, NoneType), 16, 16),
    "domain": ((str, NoneType), 0, _TEXT),
    "ext": ((bytes,), 0, _ANY),
}
_WHOLE = ((int,), 0, _ANY)
_FIELDS = tuple((name, *_KINDS.get(name, _WHOLE)) for name in FIELD_NAMES)


def decode_header(data: bytes) -> Header:
    """Read a header; raises EnvelopeError unless `data` is the canonical encoding of one."""
    try:
        values = cbor2.loads(data)
    except Exception as error:
        # Whatever the library meets in a stranger's bytes, it is the bytes' fault.
        raise EnvelopeError(
            f"header is not CBOR ({type(error).__name__}); drop the record"
        ) from None
    if not isinstance(values, list) or not values:
        raise EnvelopeError("header is not a CBOR array; drop the record")
    # Bounded before it is printed: a number may have more digits than Python turns into text.
    if type(values[0]) is not int or not 0 <= values[0] <= _ANY:
        raise EnvelopeError("header begins with no version number; drop the record")
    if values[0] != HEADER_VERSION:
        raise EnvelopeError(
            f"header version {values[0]}, expected {HEADER_VERSION}; "
            "quarantine the record until a reader of that version is installed"
        )
    if len(values) != len(FIELD_NAMES):
        raise EnvelopeError(f"header has {len(values)} fields, expected {len(FIELD_NAMES)}")
    header = header_of(values)
    _check(header, values)
    if _encoded(values) != data:
        raise EnvelopeError("header is not in canonical encoding; drop the record")
    return header


def header_of(values: Sequence[Any]) -> Header:
    """A header from its 22 values in encoding order, none of them checked."""
    header = object.__new__(Header)
    for put, value in zip(_PUTS, values, strict=True):
        put(header, value)
    return header


def _encoded(values: Sequence[Any]) -> bytes:
    # Whole numbers, byte strings, texts and null have one shortest form, which is what is written
    # in any case; the library's canonical mode is for maps and floats, and slower.
    return cbor2.dumps(values)


def is_sound(header: Header) -> bool:
    """Whether `decode_header` would accept this header's encoding."""
    try:
        _check(header, _values(header))
    except EnvelopeError:
        return False
    return header.version == HEADER_VERSION


def _check(header: Header, values: Sequence[Any]) -> None:
    _check_fields(values)
    if header.subject_kind not in (0, 1) or header.consent not in (0, 1, 2):
        raise EnvelopeError("header subject kind or consent ceiling is out of range")
    if header.origin not in (0, 1, 2):
        raise EnvelopeError("header origin is out of range")
    if header.expiry_s <= header.created_s:
        raise EnvelopeError("header expires before it was created")


def _check_fields(values: Sequence[Any]) -> None:
    for (name, kinds, least, most), value in zip(_FIELDS, values, strict=True):
        kind = type(value)
        if kind is int:
            size = value
        elif value is None:
            size = least
        else:
            size = len(value) if kind in kinds else -1
        if kind not in kinds or not least <= size <= most:
            raise EnvelopeError(f"header field {name} has the wrong type or length")
        # No text of PostgreSQL holds it.
        if kind is str and "\0" in value:
            raise EnvelopeError(f"header field {name} holds a NUL character")
