"""Ed25519 signatures: nodes sign traces, the issuer signs periods, the gate signs drafters."""

from pathlib import Path
from typing import Self

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from nacl.bindings import crypto_sign_open
from nacl.exceptions import BadSignatureError

from draftkeep.policies import secret_file

PUBLIC_BYTES = 32
SIGNATURE_BYTES = 64


class SigningKey:
    """A private Ed25519 key, made from its 32 secret bytes, which nothing here gives back."""

    __slots__ = ("_key", "public")

    def __init__(self, seed: bytes) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._key.public_key().public_bytes_raw()

    @classmethod
    def load_or_create(cls, path: Path) -> Self:
        """The key whose seed lies in `path`; made there, durably and mode 0600, if missing."""
        return cls(secret_file.load_or_create(path))

    @classmethod
    def load(cls, path: Path) -> Self:
        """The key whose seed lies in `path`; ConfigError where there is none."""
        return cls(secret_file.load(path))

    def sign(self, message: bytes) -> bytes:
        """The 64-byte signature over `message`; the same bytes every time."""
        return self._key.sign(message)


def verify(public: bytes, signature: bytes, message: bytes) -> bool:
    """Whether `public` signed `message` so. A key or signature of odd length is a plain no.

    Stricter than RFC 8032: a key of small order, under which anybody can sign anything, is a no
    too, and so is a signature whose point is of small order.
    """
    if len(public) != PUBLIC_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        # libsodium takes half the time of OpenSSL for this, and it is asked twice a trace.
        crypto_sign_open(signature + message, public)
    except BadSignatureError:
        return False
    return True
