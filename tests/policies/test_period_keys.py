"""HPKE against a second derivation, written out from RFC 9180 and the X-Wing combiner."""

import hashlib
import hmac
import os

import pytest
from cryptography.hazmat.primitives.asymmetric import mlkem, x25519
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from draftkeep.errors import EnvelopeError, FormatError
from draftkeep.policies import period_keys

INFO = b"some info"


def test_sizes_and_round_trip() -> None:
    private, share = period_keys.generate_private(), os.urandom(32)
    public = period_keys.public_of(private)
    encapsulation = period_keys.seal_share(public, share, INFO)
    sizes = (len(private), len(public), len(encapsulation))
    assert sizes == (period_keys.PRIVATE_BYTES, period_keys.PUBLIC_BYTES, 1168)
    assert period_keys.ENCAPSULATION_BYTES == 1168
    assert period_keys.open_share(private, encapsulation, INFO) == share
    assert period_keys.seal_share(public, share, INFO) != encapsulation


def test_the_encapsulation_is_what_the_documents_say() -> None:
    private, share = period_keys.generate_private(), os.urandom(32)
    sealed = period_keys.seal_share(period_keys.public_of(private), share, INFO)
    key, nonce = _schedule(_decapsulate(private, sealed[:1120]))
    assert AESGCM(key).decrypt(nonce, sealed[1120:], b"") == share


def test_another_key_info_or_any_flipped_byte_is_refused() -> None:
    private, share = period_keys.generate_private(), os.urandom(32)
    sealed = period_keys.seal_share(period_keys.public_of(private), share, INFO)
    with pytest.raises(EnvelopeError):
        period_keys.open_share(period_keys.generate_private(), sealed, INFO)
    with pytest.raises(EnvelopeError):
        period_keys.open_share(private, sealed, INFO + b"!")
    for at in range(len(sealed)):
        broken = bytearray(sealed)
        broken[at] ^= 1 << (at % 8)
        with pytest.raises(EnvelopeError):
            period_keys.open_share(private, bytes(broken), INFO)
    for odd in (b"", sealed[:-1], sealed + b"\0"):
        with pytest.raises(EnvelopeError):
            period_keys.open_share(private, odd, INFO)


@pytest.mark.parametrize("public", [b"", bytes(1215), bytes(1216), b"\xff" * 1216])
def test_a_public_key_that_is_none_is_refused(public: bytes) -> None:
    with pytest.raises(FormatError, match="public key"):
        period_keys.seal_share(public, bytes(32), INFO)


def _decapsulate(private: bytes, encapsulated: bytes) -> bytes:
    lattice = mlkem.MLKEM768PrivateKey.from_seed_bytes(private[:64])
    curve = x25519.X25519PrivateKey.from_private_bytes(private[64:])
    curve_ct = encapsulated[1088:]
    return hashlib.sha3_256(
        lattice.decapsulate(encapsulated[:1088])
        + curve.exchange(x25519.X25519PublicKey.from_public_bytes(curve_ct))
        + curve_ct
        + curve.public_key().public_bytes_raw()
        + rb"\.//^\ "[:6]
    ).digest()


def _schedule(shared: bytes) -> tuple[bytes, bytes]:
    context = b"\0" + _extract(b"", b"psk_id_hash", b"") + _extract(b"", b"info_hash", INFO)
    secret = _extract(shared, b"secret", b"")
    return _expand(secret, b"key", context, 32), _expand(secret, b"base_nonce", context, 12)


def _extract(salt: bytes, label: bytes, secret: bytes) -> bytes:
    message = b"HPKE-v1" + period_keys.SUITE_ID + label + secret
    return hmac.digest(salt, message, "sha256")


def _expand(key: bytes, label: bytes, info: bytes, length: int) -> bytes:
    labelled = length.to_bytes(2, "big") + b"HPKE-v1" + period_keys.SUITE_ID + label + info
    return hmac.digest(key, labelled + b"\x01", "sha256")[:length]
