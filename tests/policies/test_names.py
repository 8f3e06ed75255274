import hashlib
import hmac
import json
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from draftkeep.policies import names
from draftkeep.policies.retention import PeriodRecord
from draftkeep.policies.signing import SigningKey

GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden" / "envelope-v1.json").read_text(encoding="utf-8")
)
INPUTS, NAMES, PERIOD = GOLDEN["inputs"], GOLDEN["names"], GOLDEN["period"]
LOOKUP = bytes.fromhex(INPUTS["lookup_key"])
REQUEST = bytes.fromhex(NAMES["request_id"])


def test_frozen_names() -> None:
    subject_key, period_id = (
        bytes.fromhex(value) for value in (INPUTS["subject_key"], PERIOD["period_id"])
    )
    name = INPUTS["subject_name"]
    assert names.subject_tag(LOOKUP, name).hex() == NAMES["subject_tag"]
    assert names.alias(subject_key, "acme", period_id).hex() == NAMES["alias"]
    assert names.request_id(LOOKUP, bytes.fromhex(INPUTS["response_id"])) == REQUEST
    assert names.held_out(LOOKUP, name, REQUEST) is NAMES["held_out_named"]
    assert names.held_out(LOOKUP, None, REQUEST) is NAMES["held_out_anonymous"]
    out = [i for i in range(100) if names.held_out(LOOKUP, f"subject-{i}", bytes(16))]
    assert out == NAMES["held_out_of_0_to_99"]


def test_frozen_names_written_out() -> None:
    """The same values from the definitions alone."""
    name = INPUTS["subject_name"].encode()
    tag = hmac.new(LOOKUP, b"draftkeep/v1/subject" + name, hashlib.sha256).hexdigest()
    assert tag == NAMES["subject_tag"]
    key, period_id = bytes.fromhex(INPUTS["subject_key"]), bytes.fromhex(PERIOD["period_id"])
    message = b"draftkeep/v1/alias" + b"\0\0\0\x04acme" + b"\0\0\0\x10" + period_id
    assert hmac.new(key, message, hashlib.sha256).hexdigest()[:32] == NAMES["alias"]


def test_frozen_period_record() -> None:
    record = PeriodRecord(
        tenant=PERIOD["tenant"],
        period_id=bytes.fromhex(PERIOD["period_id"]),
        start_s=PERIOD["start_s"],
        destroy_at_s=PERIOD["destroy_at_s"],
        public_key=bytes.fromhex(PERIOD["public_key"]),
        signature=bytes.fromhex(PERIOD["signature"]),
    )
    issuer = SigningKey(bytes.fromhex(INPUTS["issuer_seed"]))
    assert record.signed_bytes().hex() == PERIOD["signed_bytes"]
    assert issuer.sign(record.signed_bytes()) == record.signature
    assert issuer.public.hex() == INPUTS["issuer_public"]
    assert record.verify(issuer.public)


def test_one_subject_in_ten_is_held_out_with_all_its_requests() -> None:
    out = [i for i in range(20_000) if names.held_out(LOOKUP, f"s{i}", bytes(16))]
    assert 1_850 < len(out) < 2_150
    for i in (out[0], out[0] + 1):
        bits = {names.held_out(LOOKUP, f"s{i}", bytes([j]) * 16) for j in range(50)}
        assert len(bits) == 1
    anonymous = sum(names.held_out(LOOKUP, None, i.to_bytes(16, "big")) for i in range(20_000))
    assert 1_850 < anonymous < 2_150


@given(first=st.lists(st.binary()), second=st.lists(st.binary()))
def test_lp_reads_in_one_way(first: list[bytes], second: list[bytes]) -> None:
    joined = [b"".join(names.lp(part) for part in parts) for parts in (first, second)]
    assert (joined[0] == joined[1]) == (first == second)


@given(name=st.text(st.characters(exclude_categories=())))
def test_any_text_json_can_carry_has_a_tag(name: str) -> None:
    assert len(names.subject_tag(LOOKUP, name)) == 32
