"""A drafter's directory as bytes: written whole, named by its digest, verified, signed."""

from collections.abc import Callable, Mapping
from pathlib import Path

from draftkeep.errors import ModelError
from draftkeep.files import new_directory, write_file
from draftkeep.policies.signing import verify
from draftkeep.store.models.manifest import (
    MANIFEST_FILE,
    SIGNATURE_FILE,
    digest_of,
    signed_message,
)

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
_ALLOWED = frozenset((CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE, SIGNATURE_FILE, *TOKENIZER_FILES))


def write_files(drafters_dir: Path, files: Mapping[str, bytes]) -> bytes:
    """Write the files to `drafters_dir`/<hex digest>, whole or not at all; returns the digest.

    A directory of that name is the same content and stays as it is.
    """
    digest = digest_of(files)
    final = drafters_dir / digest.hex()
    if not final.is_dir():
        with new_directory(final) as building:
            for name, data in files.items():
                (building / name).write_bytes(data)
    return digest


def read_verified(directory: Path) -> tuple[bytes, dict[str, bytes]]:
    """The digest and the bytes of every file of a drafter.

    Raises ModelError where a file has no place in a drafter, or the content is not what the
    directory's name says.
    """
    if not directory.is_dir():
        raise ModelError(f"no drafter at {directory}; check the digest, or fetch it again")
    files: dict[str, bytes] = {}
    for path in sorted(directory.iterdir()):
        if path.name.startswith(f".{SIGNATURE_FILE}."):
            continue  # a signature that is being written, or whose writer died
        if path.name not in _ALLOWED or path.is_symlink() or not path.is_file():
            raise ModelError(
                f"drafter {directory.name[:12]} holds {path.name!r:.60}, which no drafter has; "
                "fetch it again"
            )
        files[path.name] = path.read_bytes()
    digest = digest_of(files)
    if digest.hex() != directory.name:
        raise ModelError(
            f"the content of drafter {directory.name[:12]} has digest {digest.hex()[:12]}: it was "
            "altered or damaged; fetch it again"
        )
    return digest, files


def sign_drafter(directory: Path, sign: Callable[[bytes], bytes]) -> bytes:
    """Put the gate's signature beside a saved drafter, whose digest is checked anew."""
    digest, _ = read_verified(directory)
    signature = sign(signed_message(digest))
    write_file(directory / SIGNATURE_FILE, signature)
    return signature


def check_signature(signature: bytes, digest: bytes, gate_public: bytes) -> None:
    """Raise ModelError unless the gate with this public key signed this digest."""
    if not verify(gate_public, signature, signed_message(digest)):
        raise ModelError(
            f"drafter {digest.hex()[:12]} is not signed by this gate; only drafters the gate "
            "admitted are loaded: admit it, or check which gate key this node trusts"
        )


def need(files: Mapping[str, bytes], name: str) -> bytes:
    """The bytes of one file; ModelError where the drafter lacks it."""
    if name not in files:
        raise ModelError(f"the drafter has no {name}; fetch it again")
    return files[name]
