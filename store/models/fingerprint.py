"""Fingerprints: which target and which tokenizer a trace or a drafter belongs to.

lp(x) is the length of x as 4 bytes big-endian, then x. canonical(v) is JSON with sorted keys, no
spaces and only ASCII (`json.dumps(v, sort_keys=True, separators=(",", ":"))`).

Tokenizer fingerprint: SHA-256("draftkeep/v1/tokenizer" || lp(canonical(v))), v made from
`tokenizer.json`: an object of `vocab` (token to id), `merges` (a list of pairs, in order),
`added_tokens` (in order of id), `normalizer` and `pre_tokenizer` (null where absent).

Target fingerprint: SHA-256("draftkeep/v1/target" || lp(canonical(c)) || tensors || lp(t)). c is the
object in `config.json` without `transformers_version`, `_name_or_path` and other keys that begin
with an underscore. tensors holds, for each tensor of the *.safetensors files in order of its name
(by UTF-8 bytes), lp(name) || lp(dtype as safetensors spells it) || lp(shape, 8 bytes big-endian for
each dimension) || the number of data bytes in 8 bytes big-endian || the data bytes as they lie in
the file. t is the tokenizer fingerprint.
"""

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftkeep.errors import ModelError
from draftkeep.files import write_file

_CHUNK_BYTES = 1 << 22
_MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprints:
    """The two 32-byte digests of one directory."""

    target: bytes
    tokenizer: bytes


def fingerprints(directory: Path, *, cache_dir: Path) -> Fingerprints:
    """Both fingerprints of a model directory, computed once for a file set.

    Remembered under `cache_dir`/fingerprints by the name, size and modification time of every
    file that counts; a change of any of them computes anew.
    """
    state = _file_set(directory)
    name = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:32]
    remembered = cache_dir / "fingerprints" / f"{name}.json"
    known = _recall(remembered, state)
    if known is not None:
        return known
    tokenizer = tokenizer_fingerprint(_read(directory / "tokenizer.json"))
    target = target_fingerprint(directory, tokenizer)
    entry = {"files": state, "target": target.hex(), "tokenizer": tokenizer.hex()}
    write_file(remembered, json.dumps(entry).encode())
    return Fingerprints(target=target, tokenizer=tokenizer)


def tokenizer_fingerprint(data: bytes) -> bytes:
    """The fingerprint of the bytes of a `tokenizer.json`. Raises ModelError where it is not one."""
    try:
        whole = json.loads(data)
        model = whole["model"]
        counted = {
            "vocab": model["vocab"],
            "merges": [_pair(merge) for merge in model.get("merges", [])],
            "added_tokens": sorted(whole["added_tokens"], key=lambda token: int(token["id"])),
            "normalizer": whole.get("normalizer"),
            "pre_tokenizer": whole.get("pre_tokenizer"),
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ModelError(
            "tokenizer.json is not a tokenizer of the `tokenizers` library; "
            "save the tokenizer again with its fast implementation"
        ) from None
    return hashlib.sha256(b"draftkeep/v1/tokenizer" + _lp(canonical(counted))).digest()


def target_fingerprint(directory: Path, tokenizer: bytes) -> bytes:
    """The fingerprint of config.json and every *.safetensors tensor, with the tokenizer's."""
    config = _json_object(directory / "config.json")
    counted = {
        key: value
        for key, value in config.items()
        if key != "transformers_version" and not key.startswith("_")
    }
    digest = hashlib.sha256(b"draftkeep/v1/target" + _lp(canonical(counted)))
    for name, place in sorted(_tensors(directory).items(), key=lambda item: item[0].encode()):
        place.feed(name, digest)
    digest.update(_lp(tokenizer))
    return digest.digest()


def canonical(value: Any) -> bytes:
    """The one JSON encoding that fingerprints and manifests are hashed over."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Where one tensor lies: its data bytes are [start, end) of `path`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    def feed(self, name: str, digest: "hashlib._Hash") -> None:
        digest.update(_lp(name.encode()) + _lp(self.dtype.encode()))
        digest.update(_lp(struct.pack(f">{len(self.shape)}Q", *self.shape)))
        left = self.end - self.start
        digest.update(struct.pack(">Q", left))
        with self.path.open("rb") as file:
            file.seek(self.start)
            while left:
                chunk = file.read(min(left, _CHUNK_BYTES))
                if not chunk:
                    raise ModelError(f"{self.path.name} ends inside tensor {name}; copy it again")
                digest.update(chunk)
                left -= len(chunk)


def _tensors(directory: Path) -> dict[str, _Place]:
    found: dict[str, _Place] = {}
    for path in sorted(directory.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(min(length, _MAX_HEADER_BYTES)))
            entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
            for name, entry in entries.items():
                if name in found:
                    raise ModelError(f"two files of {directory.name} hold the tensor {name}")
                found[name] = _place(path, 8 + length, entry)
        except (struct.error, ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(f"{path.name} is not a safetensors file; copy it again") from None
    if not found:
        raise ModelError(
            f"{directory} holds no *.safetensors; other weight files (pickles) are never opened: "
            "convert the model with save_pretrained"
        )
    return found


def _place(path: Path, data_start: int, entry: Mapping[str, Any]) -> _Place:
    start, end = entry["data_offsets"]
    return _Place(
        path=path,
        dtype=str(entry["dtype"]),
        shape=tuple(int(size) for size in entry["shape"]),
        start=data_start + int(start),
        end=data_start + int(end),
    )


def _file_set(directory: Path) -> list[list[Any]]:
    names = ["config.json", "tokenizer.json"]
    names += sorted(path.name for path in directory.glob("*.safetensors"))
    rows: list[list[Any]] = []
    for name in names:
        try:
            stat = (directory / name).stat()
        except OSError:
            raise ModelError(
                f"{directory} has no {name}; expected a directory made by save_pretrained, with a "
                "fast tokenizer"
            ) from None
        rows.append([name, stat.st_size, stat.st_mtime_ns])
    return rows


def _recall(path: Path, state: list[list[Any]]) -> Fingerprints | None:
    try:
        entry = json.loads(path.read_bytes())
        if entry["files"] != state:
            return None
        return Fingerprints(
            target=bytes.fromhex(entry["target"]), tokenizer=bytes.fromhex(entry["tokenizer"])
        )
    except (OSError, ValueError, KeyError, TypeError):
        # A lost or damaged memory costs one computation, nothing else.
        return None


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(path))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ModelError(f"{path} is not a JSON object; copy the model again")
    return value


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None


def _pair(merge: Any) -> list[str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return [str(left), str(right)]


def _lp(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data
