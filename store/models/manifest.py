"""The manifest of a drafter (draftkeep.json) and the digest that names its directory.

Digest: SHA-256("draftkeep/v1/drafter" || canonical(listing)), where listing is the JSON list of
[file name, size, hexadecimal SHA-256] of every file but `signature`, sorted by name, and canonical
is the encoding of `draftkeep.store.models.fingerprint`. The gate signs
"draftkeep/v1/drafter-signature" || digest with Ed25519; `signature` holds the 64 raw bytes.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from draftkeep.errors import ModelError
from draftkeep.store.models.fingerprint import canonical

MANIFEST_FORMAT = 1
MANIFEST_FILE = "draftkeep.json"
SIGNATURE_FILE = "signature"


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a drafter is and where it came from.

    `target` and `tokenizer` are fingerprints in hexadecimal, `parent` the digest of the drafter it
    was trained from (None: cut from the target). `lineage` holds counts (never aliases, which the
    catalog keeps), `measures` the figures of its evaluation. `created_s` is Unix time.
    """

    target: str
    tokenizer: str
    layers: int
    vocab: int
    created_s: int = 0
    parent: str | None = None
    lineage: Mapping[str, int] = field(default_factory=dict)
    measures: Mapping[str, float] = field(default_factory=dict)
    format: int = MANIFEST_FORMAT

    def encode(self) -> bytes:
        """The bytes of draftkeep.json."""
        return canonical(asdict(self)) + b"\n"


def decode_manifest(data: bytes) -> Manifest:
    """Read draftkeep.json. Raises ModelError on another format or anything odd."""
    try:
        values: Any = json.loads(data)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise ModelError(f"{MANIFEST_FILE} is not a JSON object; fetch the drafter again")
    if values.get("format") != MANIFEST_FORMAT:
        raise ModelError(
            f"{MANIFEST_FILE} has format {values.get('format')!r:.20}, expected {MANIFEST_FORMAT}; "
            "it was written by another version of draftkeep"
        )
    if set(values) != {item.name for item in fields(Manifest)} or not _well_typed(values):
        raise ModelError(f"{MANIFEST_FILE} has missing, unknown or mistyped keys")
    return Manifest(**values)


def digest_of(files: Mapping[str, bytes]) -> bytes:
    """The digest of a drafter directory given the bytes of its files; the signature is left out."""
    listing = [
        [name, len(data), hashlib.sha256(data).hexdigest()]
        for name, data in sorted(files.items())
        if name != SIGNATURE_FILE
    ]
    return hashlib.sha256(b"draftkeep/v1/drafter" + canonical(listing)).digest()


def signed_message(digest: bytes) -> bytes:
    """What the gate signs to admit the drafter with this digest."""
    return b"draftkeep/v1/drafter-signature" + digest


def _well_typed(values: dict[str, Any]) -> bool:
    tables = (values["lineage"], values["measures"])
    if not all(isinstance(table, dict) for table in tables):
        return False
    numbers = [values["layers"], values["vocab"], values["created_s"], *values["lineage"].values()]
    return (
        _is_digest(values["target"])
        and _is_digest(values["tokenizer"])
        and (values["parent"] is None or _is_digest(values["parent"]))
        and all(isinstance(number, int) for number in numbers)
        and all(isinstance(value, int | float) for value in values["measures"].values())
    )


def _is_digest(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and not set(value) - set("0123456789abcdef")
