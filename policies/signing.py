"""Ed25519 signatures: nodes sign traces, the issuer signs periods, the gate signs drafters."""

from functools import lru_cache
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from draftkeep.policies import secret_file

PUBLIC_BYTES = 32
SIGNATURE_BYTES = 64
# A node signs all its traces with one key.
_KEYS = 1024


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
    """Whether `public` signed `message` so. A key or signature of odd length is a plain no."""
    try:
        _public_key(public).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


@lru_cache(maxsize=_KEYS)
def _public_key(public: bytes) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(public)
