"""Names that do not link: what stands for subjects and requests outside the keyring.

lp(x) is the length of x as 4 bytes big-endian, then x. HMAC is HMAC-SHA-256. Texts are UTF-8; a
lone surrogate, which JSON can carry, counts as its three-byte form.
"""

import hmac
import struct

ID_BYTES = 16
_HELD_OUT_ONE_IN = 10


def lp(data: bytes) -> bytes:
    """`data` behind its length, so that a concatenation of fields reads in one way only."""
    return struct.pack(">I", len(data)) + data


def text(value: str) -> bytes:
    """The bytes a text contributes to keys and signatures."""
    return value.encode("utf-8", "surrogatepass")


def mac(key: bytes, message: bytes) -> bytes:
    """HMAC-SHA-256, 32 bytes."""
    return hmac.digest(key, message, "sha256")


def subject_tag(lookup_key: bytes, name: str) -> bytes:
    """What a subject's keyring row is found by, 32 bytes.

    HMAC(lookup key, "draftkeep/v1/subject" || name).
    """
    return mac(lookup_key, b"draftkeep/v1/subject" + text(name))


def alias(subject_key: bytes, tenant: str, period_id: bytes) -> bytes:
    """What stands for a subject in the headers of one period, 16 bytes.

    HMAC(subject key, "draftkeep/v1/alias" || lp(tenant) || lp(period id)), its first 16 bytes.
    """
    return mac(subject_key, b"draftkeep/v1/alias" + lp(text(tenant)) + lp(period_id))[:ID_BYTES]


def request_id(lookup_key: bytes, response_id: bytes) -> bytes:
    """The header's request id, the same for all choices of a request, 16 bytes.

    HMAC(lookup key, "draftkeep/v1/request" || response id), its first 16 bytes.
    """
    return mac(lookup_key, b"draftkeep/v1/request" + response_id)[:ID_BYTES]


def held_out(lookup_key: bytes, subject: str | None, request: bytes) -> bool:
    """Whether a trace is held out: one subject in ten, with all it ever sends.

    The first 8 bytes, big-endian, of HMAC(lookup key, "draftkeep/v1/heldout" || subject name)
    below 2^64 / 10. The header's request id stands in for the name of an anonymous caller.
    """
    unit = request if subject is None else text(subject)
    draw = int.from_bytes(mac(lookup_key, b"draftkeep/v1/heldout" + unit)[:8], "big")
    return draw * _HELD_OUT_ONE_IN < 2**64
