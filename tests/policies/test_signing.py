"""Ed25519: two implementations agree on what is signed, and ours refuses keys of small order."""

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given
from hypothesis import strategies as st

from draftkeep.policies.signing import SigningKey, verify

# RFC 8032, 7.1: secret key, public key, message, signature of TEST 1 to 3.
RFC_8032 = [
    (
        "9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60",
        "d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a",
        "",
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
        "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b",
    ),
    (
        "4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb",
        "3d4017c3e843895a92b70aa74d1b7ebc9c982ccf2ec4968cc0cd55f12af4660c",
        "72",
        "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
        "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00",
    ),
    (
        "c5aa8df43f9f837bedb7442f31dcb7b166d38535076f094b85ce3a2e0b4458f7",
        "fc51cd8e6218a1a38da47ed00230f0580816ed13ba3303ac5deb911548908025",
        "af82",
        "6291d657deec24024827e69c3abe01a30ce548a284743a445e3680d7db5ac3ac"
        "18ff9b538d16f290ae67f760984dc6594a7c15e9716ed28dc027beceea1ec40a",
    ),
]
ORDER = 2**252 + 27742317777372353535851937790883648493
NEUTRAL = bytes([1]) + bytes(31)


def openssl_accepts(public: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, message)
    except InvalidSignature:
        return False
    return True


@pytest.mark.parametrize(("seed", "public", "message", "signature"), RFC_8032)
def test_the_signatures_of_the_rfc(seed: str, public: str, message: str, signature: str) -> None:
    key = SigningKey(bytes.fromhex(seed))
    assert key.public.hex() == public
    assert key.sign(bytes.fromhex(message)).hex() == signature
    assert verify(key.public, bytes.fromhex(signature), bytes.fromhex(message))


@given(
    seed=st.binary(min_size=32, max_size=32),
    message=st.binary(max_size=200),
    part=st.sampled_from(["public", "signature", "message"]),
    bit=st.integers(0, 1599),
)
def test_a_changed_bit_anywhere_is_refused(
    seed: bytes, message: bytes, part: str, bit: int
) -> None:
    key = SigningKey(seed)
    parts = {"public": key.public, "signature": key.sign(message), "message": message}
    assert verify(**parts)
    changed = bytearray(parts[part] or b"\0")
    changed[bit // 8 % len(changed)] ^= 1 << bit % 8
    assert not verify(**{**parts, part: bytes(changed)})


@given(public=st.binary(max_size=70), signature=st.binary(max_size=70), message=st.binary())
def test_lengths_that_are_off_are_a_plain_no(
    public: bytes, signature: bytes, message: bytes
) -> None:
    assert not verify(public, signature, message)


def test_where_the_signature_ends_is_not_up_to_whoever_gives_it() -> None:
    key = SigningKey(bytes(32))
    message = b"message"
    signature = key.sign(message)
    assert verify(key.public, signature, message)
    assert not verify(key.public, signature[:60], signature[60:] + message)
    assert not verify(key.public, signature + message[:1], message[1:])
    assert not verify(key.public + b"x", signature, message)


def test_a_signature_cannot_be_spelled_in_a_second_way() -> None:
    key = SigningKey(bytes(32))
    signature = key.sign(b"m")
    scalar = int.from_bytes(signature[32:], "little")
    assert not verify(key.public, signature[:32] + (scalar + ORDER).to_bytes(32, "little"), b"m")


def test_a_key_under_which_anybody_can_sign_is_refused() -> None:
    signature = NEUTRAL + bytes(32)
    assert openssl_accepts(NEUTRAL, signature, b"anything")
    assert not verify(NEUTRAL, signature, b"anything")
