import json
from dataclasses import replace
from datetime import UTC
from pathlib import Path
from typing import Any

import cbor2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftkeep.errors import EnvelopeError
from draftkeep.ingest.header import FIELD_NAMES, Header, decode_header

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "envelope-v1.json").read_text(encoding="utf-8")
)
TEXT_FIELDS = ("tenant", "node", "domain")


def golden_header() -> Header:
    fields: dict[str, Any] = {
        name: bytes.fromhex(value) if isinstance(value, str) and name not in TEXT_FIELDS else value
        for name, value in GOLDEN["header"].items()
    }
    return Header(**fields)


HEADER = golden_header()
UINT = st.integers(0, 2**63 - 1)
NAME = st.text(st.characters(exclude_characters="\0", codec="utf-8"), min_size=1, max_size=255)
HEADERS = st.builds(
    replace,
    st.just(HEADER),
    trace_id=st.binary(min_size=16, max_size=16),
    tenant=NAME,
    node=NAME,
    subject_kind=st.sampled_from((0, 1)),
    created_s=st.integers(0, 2**40),
    expiry_s=st.integers(2**41, 2**63 - 1),
    consent=st.sampled_from((0, 1, 2)),
    origin=st.sampled_from((0, 1, 2)),
    policy_version=UINT,
    parent_trace_id=st.none() | st.binary(min_size=16, max_size=16),
    domain=st.none() | NAME,
    prompt_tokens=UINT,
    positions=UINT,
    body_bytes=UINT,
    ext=st.binary(max_size=300),
)


def test_frozen_encoding() -> None:
    assert HEADER.encode().hex() == GOLDEN["header_bytes"]
    assert decode_header(bytes.fromhex(GOLDEN["header_bytes"])) == HEADER


@given(HEADERS)
def test_a_header_comes_back_bit_for_bit(header: Header) -> None:
    assert decode_header(header.encode()) == header
    assert decode_header(header.encode()).encode() == header.encode()


@given(header=HEADERS, data=st.data())
def test_there_is_one_encoding_of_a_header(header: Header, data: st.DataObject) -> None:
    """Whatever bytes are accepted are the encoding of what they were read as."""
    encoded = bytearray(header.encode())
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= 1 << data.draw(st.integers(0, 7))
    try:
        read = decode_header(bytes(encoded))
    except EnvelopeError:
        return
    assert read != header
    assert read.encode() == bytes(encoded)


@given(st.binary(max_size=400))
def test_noise_is_refused_with_the_one_error(data: bytes) -> None:
    with pytest.raises(EnvelopeError):
        decode_header(data)


CBOR = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(0, 2**16).map(lambda bits: 1 << bits)
    | st.floats()
    | st.decimals()
    | st.fractions()
    | st.datetimes(timezones=st.just(UTC))
    | st.uuids()
    | st.ip_addresses()
    | st.binary()
    | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.integers() | st.text(st.characters(codec="utf-8")), inner)
        | st.builds(cbor2.CBORTag, st.integers(0, 2**64 - 1) | st.integers(0, 300), inner)
    ),
    max_leaves=8,
)


@given(
    whole=CBOR,
    head=st.sampled_from([[], [1]]),
    changes=st.dictionaries(st.integers(0, len(FIELD_NAMES) - 1), CBOR, max_size=2),
)
def test_any_other_value_is_refused_with_the_one_error(
    whole: Any, head: list[int], changes: dict[int, Any]
) -> None:
    values = [getattr(HEADER, name) for name in FIELD_NAMES]
    for at, value in changes.items():
        values[at] = value
    for other in (whole, [*head, whole], values):
        encoding = cbor2.dumps(other)
        try:
            read = decode_header(encoding)
        except EnvelopeError:
            continue
        assert read.encode() == encoding


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("trace_id", bytes(15)),
        ("trace_id", "0123456789abcdef"),
        ("target", bytes(16)),
        ("tenant", ""),
        ("tenant", "a\0"),
        ("tenant", "a" * 256),
        ("node", "\0"),
        ("domain", "\0"),
        ("domain", "a" * 256),
        ("tenant", b"acme"),
        ("subject_kind", 2),
        ("subject_kind", True),
        ("consent", 3),
        ("origin", 3),
        ("positions", -1),
        ("positions", 2**63),
        ("positions", 1.0),
        ("parent_trace_id", bytes(15)),
        ("domain", 5),
        ("ext", None),
        ("expiry_s", HEADER.created_s),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(name: str, value: Any) -> None:
    with pytest.raises(EnvelopeError):
        decode_header(replace(HEADER, **{name: value}).encode())


def test_other_encodings_shapes_and_versions_are_refused() -> None:
    values = [getattr(HEADER, name) for name in FIELD_NAMES]
    longer = cbor2.dumps([*values, 0], canonical=True)
    cases = {
        "canonical": [
            HEADER.encode() + b"\0",
            b"\x9f" + HEADER.encode()[1:] + b"\xff",
            HEADER.encode().replace(b"\x01", b"\x18\x01", 1),
        ],
        "fields, expected": [longer, cbor2.dumps(values[:-1], canonical=True)],
        "version 2": [replace(HEADER, version=2).encode()],
        "no version": [
            cbor2.dumps(versions)
            for versions in ([b"secret"], [True, 1], [1.0], [10**5000], [-(10**5000)])
        ],
        "array": [cbor2.dumps({}), cbor2.dumps([]), cbor2.dumps("text")],
        "not CBOR": [HEADER.encode()[:-1], b"", b"\x81" * 5000, b"\x9a\xff\xff\xff\xff"],
    }
    for reason, encodings in cases.items():
        for encoding in encodings:
            with pytest.raises(EnvelopeError, match=reason):
                decode_header(encoding)
