"""The key pair of a period: HPKE (RFC 9180), base mode, hybrid of ML-KEM-768 and X25519.

KEM MLKEM768-X25519 (the X-Wing combiner, id 0x647a), KDF HKDF-SHA256 (0x0001), AEAD AES-256-GCM
(0x0002). `SUITE_ID` is RFC 9180's suite_id of that triple, 10 bytes.

A private key is stored as 64-byte ML-KEM seed || 32-byte X25519 scalar, a public key as 1,184-byte
ML-KEM encapsulation key || 32-byte X25519 point.
"""

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hpke
from cryptography.hazmat.primitives.asymmetric import mlkem, x25519

from draftkeep.errors import EnvelopeError, FormatError

SUITE_ID = b"HPKE" + bytes.fromhex("647a00010002")
PRIVATE_BYTES = 64 + 32
PUBLIC_BYTES = 1184 + 32
SHARE_BYTES = 32
ENCAPSULATION_BYTES = 1088 + 32 + SHARE_BYTES + 16

_SUITE = hpke.Suite(hpke.KEM.MLKEM768_X25519, hpke.KDF.HKDF_SHA256, hpke.AEAD.AES_256_GCM)


def generate_private() -> bytes:
    """A new private key, from the operating system's randomness."""
    seed = mlkem.MLKEM768PrivateKey.generate().private_bytes_raw()
    return seed + x25519.X25519PrivateKey.generate().private_bytes_raw()


def public_of(private: bytes) -> bytes:
    """The public key that belongs to `private`."""
    lattice, curve = _halves(private)
    return lattice.public_key().public_bytes_raw() + curve.public_key().public_bytes_raw()


def seal_share(public: bytes, share: bytes, info: bytes) -> bytes:
    """The encapsulation of a 32-byte share: KEM ciphertext (1,120), AEAD ciphertext and tag (48).

    Randomised: two calls never give the same bytes. FormatError where `public` is not a key.
    """
    try:
        key = hpke.MLKEM768X25519PublicKey(
            mlkem.MLKEM768PublicKey.from_public_bytes(public[:1184]),
            x25519.X25519PublicKey.from_public_bytes(public[1184:]),
        )
        return _SUITE.encrypt(share, key, info=info)
    except ValueError:
        raise FormatError(
            f"a period's public key of {len(public)} bytes is not an ML-KEM-768 key of 1184 bytes "
            "and an X25519 key of 32; have the issuer make the period again"
        ) from None


def open_share(private: bytes, encapsulation: bytes, info: bytes) -> bytes:
    """The share inside; EnvelopeError where key, info and encapsulation do not belong together."""
    lattice, curve = _halves(private)
    key = hpke.MLKEM768X25519PrivateKey(lattice, curve)
    try:
        share = _SUITE.decrypt(encapsulation, key, info=info)
    except (InvalidTag, ValueError):
        raise EnvelopeError(
            "the encapsulated share does not open with its period's key; drop the record"
        ) from None
    if len(share) != SHARE_BYTES:
        raise EnvelopeError(f"a share has {len(share)} bytes, expected {SHARE_BYTES}")
    return share


def _halves(private: bytes) -> tuple[mlkem.MLKEM768PrivateKey, x25519.X25519PrivateKey]:
    return (
        mlkem.MLKEM768PrivateKey.from_seed_bytes(private[:64]),
        x25519.X25519PrivateKey.from_private_bytes(private[64:]),
    )
