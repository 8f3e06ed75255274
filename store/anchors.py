"""Trust anchors: the public keys by which others check periods and drafters.

They are not secret, so they lie beside the data and not with the keys: a compactor and a
drafter's reader need them and nothing else. Whoever can write here can make drafters acceptable;
guard the directory like the program itself.
"""

from pathlib import Path

from draftkeep.errors import ConfigError
from draftkeep.files import write_file
from draftkeep.policies.signing import PUBLIC_BYTES

ISSUER = "issuer.pub"
GATE = "gate.pub"


def publish_anchor(state_dir: Path, name: str, public: bytes) -> None:
    """Write an anchor durably; ConfigError where another key stands there already."""
    path = _path(state_dir, name)
    if path.exists():
        if path.read_bytes() != public:
            raise ConfigError(
                f"{path} holds another public key than this keys directory; the two do not belong "
                "together: restore the keys directory or move the anchor away"
            )
        return
    write_file(path, public)


def awaited(state_dir: Path, name: str) -> str:
    """What to say of an anchor that its role has not published yet; empty once it is there."""
    path = _path(state_dir, name)
    if path.exists():
        return ""
    by = "draftkeep serve" if name == ISSUER else "draftkeep drafters cold"
    return (
        f"{path} is not there yet; it is written at the first start of {by}: from another machine "
        "copy it"
    )


def read_anchor(state_dir: Path, name: str) -> bytes:
    """The 32 public bytes; ConfigError where the role has not published its key yet."""
    path = _path(state_dir, name)
    try:
        public = path.read_bytes()
    except FileNotFoundError:
        raise ConfigError(awaited(state_dir, name)) from None
    if len(public) != PUBLIC_BYTES:
        raise ConfigError(f"{path} has {len(public)} bytes, expected {PUBLIC_BYTES}; restore it")
    return public


def _path(state_dir: Path, name: str) -> Path:
    return state_dir / "anchors" / name
