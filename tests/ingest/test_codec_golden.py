"""Bodies on disk that every later codec must read, and bytes that nobody must trip over."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from draftkeep.errors import CodecError
from draftkeep.ingest.codec import decode_body, encode_body
from draftkeep.ingest.frame import MAX_PAYLOAD_BYTES
from draftkeep.ingest.tables import RemapTable, only_identity
from draftkeep.ingest.trace import Branch, DrafterRun, Finish, How, TopK, Trace, ValueKind
from draftkeep.kernels.sampling import Sampling

GOLDEN = Path(__file__).parents[1] / "golden" / "body-v1.bin"
F32, I32 = np.float32, np.int32

SAMPLING = Sampling(
    temperature=0.7,
    top_p=0.95,
    top_k=50,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.25,
    frequency_penalty=-0.5,
    logit_bias=((9, -100.0), (70_000, 1.5)),
    eos_ids=(2,),
    stop_ids=(40, 41),
    ignore_eos=True,
    min_tokens=3,
)


def golden_trace() -> Trace:
    """The trace that body-v1.bin holds: every field set, values on the grid."""
    return Trace(
        prompt_ids_P=np.array([1, 70_000, 40], I32),
        output_ids_T=np.array([7, 300, 12, 2], I32),
        topk=TopK(
            ids_TK=np.array([[7, 9, 12], [5, 7, -1], [-1, -1, -1], [2, -1, -1]], I32),
            logprobs_TK=np.array(
                [
                    [-0.1, -3.0, -np.inf],
                    [-0.5, -14.0, -np.inf],
                    [-np.inf] * 3,
                    [0, -np.inf, -np.inf],
                ],
                F32,
            ),
            k_T=np.array([3, 2, 0, 1], np.uint8),
            tail_T=np.array([-np.log1p(np.exp(43 / 14)), -np.inf, 0.0, -np.inf], F32),
            tail_known_T=np.array([True, False, True, True]),
        ),
        how_T=np.array([How.ACCEPTED, How.CORRECTED, How.PLAIN, How.CORRECTED], np.uint8),
        rejected_T=np.array([-1, 7, -1, 65_536], I32),
        sampling=SAMPLING,
        seed=2**63 + 7,
        choice=1,
        finish=Finish.STOP,
        prompt_cut=True,
        output_cut=False,
        held_out=True,
        value_kind=ValueKind.RAW,
        chat_template_hash=bytes(range(32)),
        drafters=(
            DrafterRun(drafter=bytes(range(32, 64)), context_start=1, positions=3),
            DrafterRun(drafter=b"", context_start=0, positions=1),
        ),
        processed_logprob_T=np.array([-0.25, -1.5, -2.0, 0.0], F32),
        branches=(
            Branch(
                start=1,
                draft_ids_N=np.array([7, 8], I32),
                topk=TopK(
                    ids_TK=np.array([[8, 300], [2, -1]], I32),
                    logprobs_TK=np.array([[-0.25, -1.5], [-0.05, -np.inf]], F32),
                    k_T=np.array([2, 1], np.uint8),
                    tail_T=np.array([-np.inf, -np.log1p(np.exp(42 / 14))], F32),
                    tail_known_T=np.array([True, True]),
                ),
            ),
        ),
        ext=b"\x01\x02",
    )


def unpack(body: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(body[1:])


def pack(payload: bytes) -> bytes:
    return b"\x01" + zstandard.ZstdCompressor().compress(payload)


def as_text(trace: Trace) -> str:
    """Every value of a trace, with the types of its arrays."""
    with np.printoptions(floatmode="unique"):
        return repr(trace)


def test_the_golden_body_reads_as_it_was_written() -> None:
    assert as_text(decode_body(GOLDEN.read_bytes(), only_identity)) == as_text(golden_trace())


def test_the_payload_of_the_golden_body_is_still_what_is_written() -> None:
    body = encode_body(golden_trace(), RemapTable.identity())
    assert unpack(body) == unpack(GOLDEN.read_bytes())


def test_the_page_on_formats_takes_apart_this_very_payload() -> None:
    page = (Path(__file__).parents[2] / "docs" / "formats.md").read_text(encoding="utf-8")
    example = page.split("### A body taken apart")[1].split("```")[1]
    digits = "".join(line.split(";")[0] for line in example.splitlines())
    assert bytes.fromhex(digits) == unpack(GOLDEN.read_bytes())


@pytest.mark.parametrize(
    ("offset", "value", "reason"),
    [
        (0, 2, "noise version 2"),
        (1, 9, "processor version 9"),
        (2, 0x40, "unknown flags"),
        (3, 3, "Finish 3"),
        (4, 3, "ValueKind 3"),
        (5, 1, "remap table in 1 bytes"),
    ],
)
def test_an_unknown_value_is_named(offset: int, value: int, reason: str) -> None:
    payload = bytearray(unpack(GOLDEN.read_bytes()))
    payload[offset] = value
    with pytest.raises(CodecError, match=reason):
        decode_body(pack(bytes(payload)), only_identity)


def test_an_unknown_codec_version_is_named() -> None:
    with pytest.raises(CodecError, match="codec version 02"):
        decode_body(b"\x02" + GOLDEN.read_bytes()[1:], only_identity)


def test_trailing_bytes_are_refused_inside_and_outside() -> None:
    body = GOLDEN.read_bytes()
    with pytest.raises(CodecError, match="1 bytes too many"):
        decode_body(pack(unpack(body) + b"\0"), only_identity)
    with pytest.raises(CodecError, match="one zstd frame"):
        decode_body(body + b"\0", only_identity)


def survives(body: bytes) -> None:
    """Reads, or is refused with the one error there is."""
    try:
        decode_body(body, only_identity)
    except CodecError:
        return


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_calmly(data: bytes) -> None:
    survives(data)
    survives(b"\x01" + data)
    survives(pack(data))


edits = st.tuples(st.integers(0, 400), st.integers(0, 3), st.binary(max_size=11))


@settings(max_examples=1500, deadline=None)
@given(st.lists(edits, min_size=1, max_size=3), st.booleans())
def test_damaged_bodies_are_refused_calmly(
    changes: list[tuple[int, int, bytes]], inside: bool
) -> None:
    body = GOLDEN.read_bytes()
    data = bytearray(unpack(body) if inside else body)
    for at, removed, inserted in changes:
        data[at : at + removed] = inserted
    survives(pack(bytes(data)) if inside else bytes(data))


def test_every_single_byte_of_a_payload_may_be_wrong() -> None:
    payload = unpack(GOLDEN.read_bytes())
    for at in range(len(payload)):
        for value in (0, 1, 0x7F, 0x80, 0xFF, payload[at] ^ 1):
            survives(pack(payload[:at] + bytes([value]) + payload[at + 1 :]))
        survives(pack(payload[:at]))


def head(positions: bytes, runs: bytes) -> bytes:
    """A payload with neutral single values, up to the list lengths."""
    neutral = bytes([1, 1, 0, 0, 0, 0, 0]) + bytes(48) + bytes(5) + bytes(4)
    return neutral + b"\0" + positions + runs


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"\x01" + zstandard.ZstdCompressor().compress(bytes(MAX_PAYLOAD_BYTES + 1)), "unpack"),
        (b"\x01" + zstandard.ZstdCompressor(write_content_size=False).compress(b"x"), "unpack"),
        (b"\x01\x28\xb5\x2f\xfd\xe0" + b"\xff" * 7 + b"\x0f\x01\0\0", "unpack"),
        (pack(head(b"\xff\xff\xff\xff\x0f", b"\x01\xff\xff\xff\xff\x0f\x00")), "positions"),
        (pack(head(b"\x80\x80\x10", b"\x01\x80\x80\x10\xff")), "entries"),
        (pack(head(b"\x01", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01")), "promises more"),
    ],
    ids=["bomb", "no-size", "claimed-size", "rows", "cells", "runs"],
)
def test_promises_are_not_believed(body: bytes, reason: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(CodecError, match=reason):
            decode_body(body, only_identity)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak_bytes < 2**20
