"""The golden files, read by a program that knows only docs/formats.md."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.formats import reader, reader_draws
from tests.formats.reader import Header, PeriodRecord
from tests.formats.reader_body import Settings, decode_body, unpack
from tests.formats.reader_cbor import FormatError

GOLDEN = Path(__file__).parents[1] / "golden"
PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
RANDOM123_ZERO = "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b"


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    """The values of envelope-v1.json."""
    values: dict[str, Any] = json.loads((GOLDEN / "envelope-v1.json").read_text())
    return values


@pytest.fixture(scope="module")
def inputs(golden: dict[str, Any]) -> dict[str, bytes]:
    """Its keys, as bytes."""
    return {
        name: bytes.fromhex(value)
        for name, value in golden["inputs"].items()
        if name != "subject_name"
    }


def unhex(value: object) -> object:
    """A value of the golden file as the field holds it."""
    texts = isinstance(value, str) and len(value) in (0, 32, 64)
    return bytes.fromhex(str(value)) if texts else value


def test_names(golden: dict[str, Any], inputs: dict[str, bytes]) -> None:
    names, lookup_key = golden["names"], inputs["lookup_key"]
    period_id = bytes.fromhex(golden["period"]["period_id"])
    stands = reader.alias(inputs["subject_key"], golden["period"]["tenant"], period_id)
    request = reader.request_id(lookup_key, inputs["response_id"])
    person = golden["inputs"]["subject_name"]
    assert stands.hex() == names["alias"]
    assert request.hex() == names["request_id"]
    assert reader.subject_tag(lookup_key, person).hex() == names["subject_tag"]
    assert reader.held_out(lookup_key, person) == names["held_out_named"]
    assert reader.held_out(lookup_key, request) == names["held_out_anonymous"]
    hundred = [n for n in range(100) if reader.held_out(lookup_key, f"subject-{n}")]
    assert hundred == names["held_out_of_0_to_99"]


def test_header_both_ways(golden: dict[str, Any]) -> None:
    data = bytes.fromhex(golden["header_bytes"])
    header = reader.decode_header(data)
    assert header == Header(**{name: unhex(value) for name, value in golden["header"].items()})  # type: ignore[arg-type]
    assert reader.encode_header(header) == data


@pytest.mark.parametrize(
    ("found", "replacement", "complaint"),
    [
        ("9601", "9602", "unknown header version"),
        ("9601", "961801", "shortest form"),
        ("9601", "9f01", "indefinite"),
        ("6461636d65", "7804" + "61636d65", "shortest form"),
        ("6461636d65", "60", "header item 3"),
        ("6461636d65", "64ffffffff", "not UTF-8"),
        ("1a6b49d27b", "1a6b530c80", "expiry is not above"),
        ("186240", "186241", "ends early"),
        ("186240", "18624000", "after the array"),
        ("186240", "f640", "header item 20"),
        ("186240", "3840" + "40", "major type"),
    ],
)
def test_header_refusals(
    golden: dict[str, Any], found: str, replacement: str, complaint: str
) -> None:
    text = golden["header_bytes"]
    assert found in text
    with pytest.raises(FormatError, match=complaint):
        reader.decode_header(bytes.fromhex(text.replace(found, replacement, 1)))


def golden_period(golden: dict[str, Any]) -> PeriodRecord:
    """The period record of the golden file."""
    said = golden["period"]
    return PeriodRecord(
        tenant=said["tenant"],
        period_id=bytes.fromhex(said["period_id"]),
        start_s=said["start_s"],
        destroy_at_s=said["destroy_at_s"],
        public_key=bytes.fromhex(said["public_key"]),
        signature=bytes.fromhex(said["signature"]),
    )


def test_period_record(golden: dict[str, Any], inputs: dict[str, bytes]) -> None:
    record = golden_period(golden)
    assert record.signed_bytes().hex() == golden["period"]["signed_bytes"]
    assert reader.public_key(inputs["period_private"]) == record.public_key
    reader.check_period_record(record, inputs["issuer_public"])
    later = replace(record, destroy_at_s=record.destroy_at_s + 1)
    with pytest.raises(FormatError, match="signature is wrong"):
        reader.check_period_record(later, inputs["issuer_public"])


def test_envelope_step_by_step(golden: dict[str, Any], inputs: dict[str, bytes]) -> None:
    said = golden["envelope"]
    record = reader.decode_record(bytes.fromhex(golden["record"]))
    header = reader.decode_header(record.header)
    assert record.header.hex() == golden["header_bytes"]
    for part in ("encapsulation", "commitment", "ciphertext", "signature"):
        assert getattr(record, part).hex() == said[part]
    assert reader.SUITE_ID.hex() == said["suite_id"]
    assert reader.share_id(record.encapsulation).hex() == said["share_id"]
    info = reader.share_info(header.tenant, header.period_id, header.node)
    assert info.hex() == said["share_info"]
    share = reader.open_share(inputs["period_private"], record.encapsulation, info)
    assert share == inputs["share"]
    key, commitment = reader.content_keys(share, inputs["subject_key"], record.header)
    assert (key.hex(), commitment.hex()) == (said["content_key"], said["commitment"])
    reader.check_node_signature(record, inputs["node_public"])
    body = reader.open_envelope(record, inputs["period_private"], inputs["subject_key"])
    assert body == inputs["body"]


def test_envelope_refusals(golden: dict[str, Any], inputs: dict[str, bytes]) -> None:
    data = bytes.fromhex(golden["record"])
    record = reader.decode_record(data)
    private, subject_key = inputs["period_private"], inputs["subject_key"]
    for wrong in (data + b"\x00", data[:-1], b"\x02" + data[1:], b""):
        with pytest.raises(FormatError):
            reader.decode_record(wrong)
    cases = {
        "another subject's key": (record, private, bytes(32)),
        "commitment is wrong": (replace(record, commitment=bytes(32)), private, subject_key),
        "not authentic": (replace(record, nonce=bytes(12)), private, subject_key),
        "another share": (replace(record, encapsulation=bytes(1168)), private, subject_key),
        "another length": (replace(record, ciphertext=b""), private, subject_key),
    }
    for complaint, case in cases.items():
        with pytest.raises(FormatError, match=complaint):
            reader.open_envelope(*case)
    with pytest.raises(FormatError, match="signature is wrong"):
        reader.check_node_signature(replace(record, nonce=bytes(12)), inputs["node_public"])


def test_period_and_deadline(golden: dict[str, Any]) -> None:
    header = reader.decode_header(bytes.fromhex(golden["header_bytes"]))
    period = golden_period(golden)
    end_s = period.destroy_at_s
    reader.check_period(header, period, end_s - 1)
    cases = {
        "deadline": (header, period, end_s),
        "deadline has": (header, replace(period, destroy_at_s=end_s - 9), end_s - 9),
        "another tenant": (replace(header, tenant="birch"), period, end_s - 1),
        "created before": (header, replace(period, start_s=header.created_s + 1), end_s - 1),
    }
    for complaint, case in cases.items():
        with pytest.raises(FormatError, match=complaint):
            reader.check_period(*case)


def test_payload_is_the_one_on_the_page() -> None:
    listing = PAGE.read_text().split("### A body taken apart")[1].split("```")[1]
    written = "".join(line.split(";")[0] for line in listing.splitlines())
    assert unpack((GOLDEN / "body-v1.bin").read_bytes()) == bytes.fromhex(written)


def test_body_settings() -> None:
    body = decode_body((GOLDEN / "body-v1.bin").read_bytes())
    assert (body.prompt_cut, body.output_cut, body.held_out) == (True, False, True)
    assert (body.finish, body.value_kind, body.remap_digest) == (0, 0, b"")
    assert (body.seed, body.choice) == (2**63 + 7, 1)
    assert body.settings == Settings(
        temperature=0.7,
        top_p=0.95,
        min_p=0.01,
        repetition=1.1,
        presence=0.25,
        frequency=-0.5,
        top_k=50,
        min_tokens=3,
        bias=((9, -100.0), (70_000, 1.5)),
        eos_ids=(2,),
        stop_ids=(40, 41),
        ignore_eos=True,
    )
    assert body.template_hash == bytes(range(32))
    assert [(run.digest, run.context_start, run.positions) for run in body.runs] == [
        (bytes(range(32, 64)), 1, 3),
        (b"", 0, 1),
    ]
    assert body.ext == b"\x01\x02"


def test_body_tokens() -> None:
    body = decode_body((GOLDEN / "body-v1.bin").read_bytes())
    assert body.prompt.tolist() == [1, 70_000, 40]
    assert body.output.tolist() == [7, 300, 12, 2]
    assert [row.ids.tolist() for row in body.rows] == [[7, 9, 12], [5, 7], [], [2]]
    assert body.rows[0].logprobs.tolist() == [-0.1, -3.0, -np.inf]
    assert [row.levels.tolist() for row in body.rows[1:]] == [[10, 280], [], [0]]
    tails = [row.tail for row in body.rows]
    np.testing.assert_allclose(tails, [1 / (1 + np.exp(43 / 14)), np.nan, 1, 0])
    assert body.how.tolist() == [0, 1, 3, 1]
    assert body.rejected == {1: 7, 3: 65_536}
    (branch,) = body.branches
    assert (branch.start, branch.drafts.tolist()) == (1, [7, 8])
    assert [row.ids.tolist() for row in branch.rows] == [[8, 300], [2]]
    assert [row.levels.tolist() for row in branch.rows] == [[5, 30], [1]]
    np.testing.assert_allclose([row.tail for row in branch.rows], [0, 1 / (1 + np.exp(42 / 14))])
    assert body.processed_logp is not None
    assert body.processed_logp.tolist() == [-0.25, -1.5, -2.0, 0.0]


def test_philox_and_gumbel() -> None:
    zero = np.zeros(1, np.uint64)
    (lanes,) = reader_draws.philox4x64_10((zero, zero, zero, zero), (0, 0))
    assert " ".join(f"{int(lane):016x}" for lane in lanes) == RANDOM123_ZERO
    noise = reader_draws.gumbel(7, 0, 3, np.array([0, 1, 9]))
    np.testing.assert_allclose(noise[:2], [1.30470899, -0.26603848], atol=5e-9)
    assert noise[2] == pytest.approx(-1.071509817144192, rel=1e-14)
