"""A second reader of shards and drafter directories, written from docs/formats.md alone."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from tests.formats.reader import Header, Record, check_signature, decode_header, encode_header, lp
from tests.formats.reader_body import I64
from tests.formats.reader_cbor import FormatError, require

HEADER_COLUMNS = tuple(field.name for field in fields(Header))
SEAL_COLUMNS = ("nonce", "ciphertext", "commitment", "signature", "encapsulation")
COLUMN_TYPES = {
    "version": pa.uint16(),
    **dict.fromkeys(
        ("trace_id", "request_id", "period_id", "alias", "share_id", "parent_trace_id"),
        pa.binary(16),
    ),
    **dict.fromkeys(("target", "tokenizer", "commitment"), pa.binary(32)),
    **dict.fromkeys(("tenant", "node", "domain"), pa.string()),
    **dict.fromkeys(("subject_kind", "consent", "origin"), pa.uint8()),
    **dict.fromkeys(
        ("created_s", "expiry_s", "policy_version", "prompt_tokens", "positions", "body_bytes"),
        pa.int64(),
    ),
    **dict.fromkeys(("ext", "ciphertext", "encapsulation"), pa.binary()),
    "nonce": pa.binary(12),
    "signature": pa.binary(64),
}
DRAFTER_FILES = {"config.json", "model.safetensors", "draftkeep.json", "tokenizer.json"}
TOKENIZER_FILES = {"tokenizer_config.json", "chat_template.jinja"}
MANIFEST_KEYS = {
    "format",
    "target",
    "tokenizer",
    "layers",
    "vocab",
    "created_s",
    "parent",
    "lineage",
    "measures",
}


@dataclass(frozen=True)
class Shard:
    """A shard's bucket, target and sealed traces, each with its encapsulation."""

    bucket_s: int
    target: bytes
    records: tuple[Record, ...]


def _sort_key(header: Header) -> tuple[bytes, bytes, int, bytes, bytes]:
    domain = (header.domain or "").encode()
    return header.tenant.encode(), domain, header.created_s, header.trace_id, header.node.encode()


def read_shard(path: Path) -> Shard:
    """A shard, checked; the headers encoded again from their columns."""
    table = pq.read_table(path)
    require(table.column_names == [*HEADER_COLUMNS, *SEAL_COLUMNS], "other columns")
    for name in table.column_names:
        require(table.schema.field(name).type == COLUMN_TYPES[name], f"column {name} is of a type")
    facts = {key.decode(): value.decode() for key, value in table.schema.metadata.items()}
    require(facts["draftkeep.shard"] == "1", "unknown shard format")
    target = bytes.fromhex(facts["draftkeep.target"])
    bucket_s = int(facts["draftkeep.bucket_s"])
    require(path.name.startswith(f"{bucket_s}-{target.hex()[:8]}-"), "the name says otherwise")
    encapsulations: dict[bytes, bytes] = {}
    records, order = [], []
    for row in table.to_pylist():
        header = Header(*(row[name] for name in HEADER_COLUMNS))
        require(header.target == target, "another target")
        require(header.expiry_s == bucket_s, "another expiry")
        if row["encapsulation"] is not None:
            require(header.share_id not in encapsulations, "an encapsulation twice")
            encapsulations[header.share_id] = row["encapsulation"]
        require(header.share_id in encapsulations, "the first row lacks its encapsulation")
        encoded = encode_header(header)
        require(decode_header(encoded) == header, "not a header")
        parts = (row["nonce"], row["ciphertext"], row["commitment"], row["signature"])
        records.append(Record(encoded, *parts, encapsulations[header.share_id]))
        order.append(_sort_key(header))
    require(order == sorted(order), "the rows are not sorted")
    return Shard(bucket_s, target, tuple(records))


def canonical(value: object) -> bytes:
    """Canonical JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()


def _pair(merge: str | list[str]) -> list[str]:
    """A merge as [left, right]; older files join the two with a space."""
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return [left, right]


def tokenizer_facts(tokenizer_json: bytes) -> dict[str, object]:
    """What a tokenizer's fingerprint covers of its tokenizer.json."""
    whole = json.loads(tokenizer_json)
    return {
        "vocab": whole["model"]["vocab"],
        "merges": [_pair(merge) for merge in whole["model"].get("merges", [])],
        "added_tokens": sorted(whole["added_tokens"], key=lambda token: int(token["id"])),
        "normalizer": whole.get("normalizer"),
        "pre_tokenizer": whole.get("pre_tokenizer"),
    }


def tokenizer_fingerprint(tokenizer_json: bytes) -> bytes:
    """The fingerprint of a tokenizer.json."""
    facts = canonical(tokenizer_facts(tokenizer_json))
    return hashlib.sha256(b"draftkeep/v1/tokenizer" + lp(facts)).digest()


@dataclass(frozen=True)
class Tensor:
    """A tensor of a safetensors file, as it lies there."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def read_safetensors(data: bytes) -> dict[str, Tensor]:
    """The tensors of a safetensors file by name."""
    size = int.from_bytes(data[:8], "little")
    listing = json.loads(data[8 : 8 + size])
    tensors = {}
    for name, facts in listing.items():
        if name != "__metadata__":
            start, end = (8 + size + offset for offset in facts["data_offsets"])
            tensors[name] = Tensor(facts["dtype"], tuple(facts["shape"]), data[start:end])
    return tensors


def target_fingerprint(config: bytes, tensors: Mapping[str, Tensor], tokenizer: bytes) -> bytes:
    """The fingerprint of a model: configuration, tensors of all its files, tokenizer."""
    said = {
        key: value
        for key, value in json.loads(config).items()
        if key != "transformers_version" and not key.startswith("_")
    }
    digest = hashlib.sha256(b"draftkeep/v1/target" + lp(canonical(said)))
    for name in sorted(tensors, key=str.encode):
        tensor = tensors[name]
        shape = b"".join(size.to_bytes(8, "big") for size in tensor.shape)
        digest.update(lp(name.encode()) + lp(tensor.dtype.encode()) + lp(shape))
        digest.update(len(tensor.data).to_bytes(8, "big") + tensor.data)
    digest.update(lp(tokenizer))
    return digest.digest()


@dataclass(frozen=True)
class Drafter:
    """A drafter directory that was found whole."""

    digest: bytes
    manifest: Mapping[str, object]
    vocab_ids: I64


def drafter_digest(files: Mapping[str, bytes]) -> bytes:
    """The digest of a drafter's files."""
    listing = [
        [name, len(data), hashlib.sha256(data).hexdigest()]
        for name, data in sorted(files.items())
        if name != "signature"
    ]
    return hashlib.sha256(b"draftkeep/v1/drafter" + canonical(listing)).digest()


def read_drafter(path: Path, gate_public: bytes | None) -> Drafter:
    """A drafter directory: its digest and, where a gate's key is given, its signature."""
    files = {
        entry.name: entry.read_bytes()
        for entry in path.iterdir()
        if not entry.name.startswith(".signature.")
    }
    strange = set(files) - DRAFTER_FILES - TOKENIZER_FILES - {"signature"}
    require(not strange and set(files) >= DRAFTER_FILES, "other files than a drafter's")
    digest = drafter_digest(files)
    require(path.name == digest.hex(), "the digest is another")
    if gate_public is not None:
        require("signature" in files, "the drafter is not signed")
        message = b"draftkeep/v1/drafter-signature" + digest
        check_signature(gate_public, files["signature"], message)
    manifest = json.loads(files["draftkeep.json"])
    require(files["draftkeep.json"] == canonical(manifest) + b"\n", "the manifest is not canonical")
    require(set(manifest) == MANIFEST_KEYS and manifest["format"] == 1, "not a manifest")
    fingerprint = tokenizer_fingerprint(files["tokenizer.json"])
    require(fingerprint.hex() == manifest["tokenizer"], "another tokenizer")
    tensors = read_safetensors(files["model.safetensors"])
    try:
        ids, head = tensors["draftkeep.vocab_ids"], tensors["lm_head.weight"]
    except KeyError as missing:
        raise FormatError("a tensor is missing") from missing
    require(ids.dtype == "I32", "the vocabulary is not int32")
    vocab_ids = np.frombuffer(ids.data, "<i4").astype(np.int64)
    require(bool((np.diff(vocab_ids) > 0).all()), "the vocabulary does not ascend")
    require(head.shape[0] == len(vocab_ids) == manifest["vocab"], "another number of rows")
    return Drafter(digest, manifest, vocab_ids)
