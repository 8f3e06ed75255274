import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftkeep.errors import EnvelopeError
from draftkeep.ingest.header import Header, decode_header
from draftkeep.ingest.record import (
    MAX_RECORD_BYTES,
    RECORD_OVERHEAD_BYTES,
    SealedTrace,
    decode_record,
    encode_record,
)

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "envelope-v1.json").read_text(encoding="utf-8")
)
RECORD = bytes.fromhex(GOLDEN["record"])


def test_frozen_record() -> None:
    sealed = decode_record(RECORD)
    envelope = GOLDEN["envelope"]
    assert sealed.header.hex() == GOLDEN["header_bytes"]
    assert sealed.nonce.hex() == GOLDEN["inputs"]["nonce"]
    for name in ("ciphertext", "commitment", "signature", "encapsulation"):
        assert getattr(sealed, name).hex() == envelope[name]
    assert encode_record(sealed) == RECORD
    body_bytes = sealed.parsed.body_bytes
    assert len(RECORD) == RECORD_OVERHEAD_BYTES + len(sealed.header) + body_bytes


@given(at=st.integers(0, len(RECORD) - 1), bit=st.integers(0, 7))
def test_a_flipped_bit_never_reads_as_the_same_trace(at: int, bit: int) -> None:
    broken = bytearray(RECORD)
    broken[at] ^= 1 << bit
    try:
        sealed = decode_record(bytes(broken))
    except EnvelopeError:
        return
    assert sealed != decode_record(RECORD)
    assert encode_record(sealed) == bytes(broken)


def test_every_cut_and_every_addition_is_refused() -> None:
    for length in range(len(RECORD)):
        with pytest.raises(EnvelopeError):
            decode_record(RECORD[:length])
    with pytest.raises(EnvelopeError, match="goes on"):
        decode_record(RECORD + b"\0")


@given(st.binary(max_size=200))
def test_noise_is_refused_with_the_one_error(data: bytes) -> None:
    with pytest.raises(EnvelopeError):
        decode_record(data)
    with pytest.raises(EnvelopeError):
        decode_record(b"\x01" + data)


def test_another_version_says_so_whatever_follows() -> None:
    for version in (0, 2, 255):
        with pytest.raises(EnvelopeError, match=f"unknown log record version {version}"):
            decode_record(bytes([version]) + RECORD[1:])


def test_the_size_limit_holds_both_ways() -> None:
    sealed = decode_record(RECORD)
    room = MAX_RECORD_BYTES - (len(RECORD) - len(sealed.ciphertext))
    largest = replace(sealed, ciphertext=bytes(room))
    assert decode_record(encode_record(largest)) == largest
    with pytest.raises(EnvelopeError, match="at most 900000"):
        encode_record(replace(sealed, ciphertext=bytes(room + 1)))
    with pytest.raises(EnvelopeError, match="at most 900000"):
        decode_record(RECORD[:1] + bytes(MAX_RECORD_BYTES))


@pytest.mark.parametrize(
    "name", ["nonce", "ciphertext", "commitment", "signature", "encapsulation"]
)
def test_a_field_of_the_wrong_length_is_named(name: str) -> None:
    sealed = decode_record(RECORD)
    values = {field.name: getattr(sealed, field.name) for field in fields(sealed) if field.init}
    with pytest.raises(EnvelopeError, match=name):
        SealedTrace(**{**values, name: bytes(7)})


def under(header: Header) -> SealedTrace:
    sealed = decode_record(RECORD)
    values = {
        field.name: getattr(sealed, field.name)
        for field in fields(sealed)
        if field.init and field.name != "header"
    }
    return SealedTrace.under(header, **values)


def test_a_trace_made_under_a_header_is_the_trace_that_is_read() -> None:
    header = decode_record(RECORD).parsed
    sealed = under(header)
    assert sealed == decode_record(RECORD)
    assert sealed.parsed is header
    assert replace(sealed, nonce=bytes(12)).parsed == header
    other = replace(header, positions=header.positions + 1)
    assert replace(sealed, header=other.encode()).parsed == other


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"version": True},
        {"trace_id": bytes(15)},
        {"tenant": ""},
        {"consent": 3},
        {"subject_kind": 2},
        {"origin": 3},
        {"expiry_s": 0},
        {"positions": -1},
        {"body_bytes": 2**63},
        {"target": "x" * 32},
        {"parent_trace_id": bytes(17)},
    ],
)
def test_a_header_that_would_not_decode_is_not_believed(change: dict[str, Any]) -> None:
    header = replace(decode_record(RECORD).parsed, **change)
    sealed = under(header)
    with pytest.raises(EnvelopeError):
        decode_header(sealed.header)
    with pytest.raises(EnvelopeError):
        _ = sealed.parsed
