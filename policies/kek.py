"""A key that wraps keys, held in a local file."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from draftkeep.errors import StoreError
from draftkeep.policies import secret_file

_NONCE_BYTES = 12


class LocalKek:
    """Wraps keys with AES-256-GCM under 32 secret bytes.

    A wrapped key is nonce (12, random), ciphertext, tag (16). `context` says what the key is for
    and is authenticated: a row that was moved or relabelled does not unwrap. Random nonces are
    safe for 2^32 wraps.
    """

    __slots__ = ("_aead", "_random")

    def __init__(self, secret: bytes, *, random: Callable[[int], bytes] = os.urandom) -> None:
        self._aead = AESGCM(secret)
        self._random = random

    @classmethod
    def load_or_create(cls, path: Path) -> Self:
        """The KEK in `path`; made there, durably and mode 0600, if missing."""
        return cls(secret_file.load_or_create(path))

    @classmethod
    def load(cls, path: Path) -> Self:
        """The KEK in `path`; ConfigError where there is none."""
        return cls(secret_file.load(path))

    def wrap(self, key: bytes, context: bytes) -> bytes:
        """`key`, readable only with this KEK and the same context."""
        nonce = self._random(_NONCE_BYTES)
        return nonce + self._aead.encrypt(nonce, key, context)

    def unwrap(self, wrapped: bytes, context: bytes) -> bytes:
        """The key inside; StoreError where KEK, context and bytes do not belong together."""
        try:
            return self._aead.decrypt(wrapped[:_NONCE_BYTES], wrapped[_NONCE_BYTES:], context)
        except (InvalidTag, ValueError):
            raise StoreError(
                "a wrapped key does not open with this KEK; the KEK file and keyring.db do not "
                "belong together or the row was altered: put the matching file back"
            ) from None
