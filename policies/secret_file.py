"""Small secret files: made once, readable by their owner only, never half written."""

import os
import secrets
from pathlib import Path

from draftkeep import files
from draftkeep.errors import ConfigError

KEY_BYTES = 32


def load_or_create(path: Path) -> bytes:
    """The 32 secret bytes in `path`; drawn from the operating system where there is no such file.

    A new file appears with all its bytes and mode 0600 or not at all, and is on disk (file and
    directory synced) before this returns. When several processes create it at once, one of them
    wins and all return the same bytes.
    """
    if not path.exists():
        _create(path, secrets.token_bytes(KEY_BYTES))
    return load(path)


def load(path: Path) -> bytes:
    """The 32 secret bytes in `path`; ConfigError where it is missing, unreadable or odd-sized."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read the key file {path.name}: {error.strerror}; this role needs it: check "
            "the keys directory and its permissions"
        ) from None
    if len(data) != KEY_BYTES:
        raise ConfigError(
            f"the key file {path.name} has {len(data)} bytes, expected {KEY_BYTES}; put the "
            "right file back"
        )
    return data


def _create(path: Path, data: bytes) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        try:
            # A link, unlike a rename, never replaces what another process put there first.
            os.link(draft, path)
        except FileExistsError:
            return
    finally:
        draft.unlink()
        files.sync(path.parent)
