"""Traces of the bench's own traffic in one file that only grows; a killed run loses none but the
one it was writing."""

import struct
from collections.abc import Iterable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

from draftkeep.distill.selection import Opened
from draftkeep.ingest.codec import decode_body, encode_body
from draftkeep.ingest.header import HEADER_VERSION, Header
from draftkeep.ingest.tables import RemapTable, only_identity
from draftkeep.ingest.trace import Origin, Trace
from draftkeep.store.models.target import TargetModel

_HEAD = struct.Struct("<II")


class TraceFile:
    """Pairs of a prompt's index and its trace, packed with the body codec.

    Not sealed: what lies here are answers to the bench's own made-up prompts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._repair()

    def append(self, items: Iterable[tuple[int, Trace]]) -> None:
        """Add traces; each is in the file when this returns."""
        table = RemapTable.identity()
        with self._path.open("ab") as file:
            for index, trace in items:
                body = encode_body(trace, table)
                file.write(_HEAD.pack(index, len(body)) + body)

    def read(self) -> Iterator[tuple[int, Trace]]:
        """Every whole entry, in the order written."""
        for index, body in self._bodies():
            yield index, decode_body(body, only_identity)

    def indices(self) -> set[int]:
        """The prompts that have a trace."""
        return {index for index, _ in self._bodies()}

    def _bodies(self) -> Iterator[tuple[int, bytes]]:
        data = self._path.read_bytes() if self._path.exists() else b""
        at = 0
        while at + _HEAD.size <= len(data):
            index, size = _HEAD.unpack_from(data, at)
            body = data[at + _HEAD.size : at + _HEAD.size + size]
            if len(body) < size:
                return
            yield index, body
            at += _HEAD.size + size

    def _repair(self) -> None:
        """Cut off an entry that was not written to its end."""
        if self._path.exists():
            whole = sum(_HEAD.size + len(body) for _, body in self._bodies())
            if whole < self._path.stat().st_size:
                with self._path.open("r+b") as file:
                    file.truncate(whole)


def opened(items: Iterable[tuple[int, Trace]], target: TargetModel, *, domain: str) -> list[Opened]:
    """Traces as a training job takes them, in the order of their index, which names them."""
    return [
        Opened(header=_header(index, trace, target, domain), trace=trace)
        for index, trace in sorted(items, key=lambda item: item[0])
    ]


def split(items: Iterable[Opened], *, held_out: set[int]) -> tuple[list[Opened], list[Opened]]:
    """(training, held out): those whose index is in `held_out` are kept from training."""
    training: list[Opened] = []
    kept: list[Opened] = []
    names = {_name(index) for index in held_out}
    for item in items:
        if item.header.trace_id in names:
            kept.append(Opened(header=item.header, trace=replace(item.trace, held_out=True)))
        else:
            training.append(item)
    return training, kept


def _name(index: int) -> bytes:
    return sha256(b"bench trace %d" % index).digest()[:16]


def _header(index: int, trace: Trace, target: TargetModel, domain: str) -> Header:
    return Header(
        version=HEADER_VERSION,
        trace_id=_name(index),
        request_id=_name(index),
        tenant="bench",
        period_id=bytes(16),
        alias=_name(index),
        subject_kind=0,
        share_id=bytes(16),
        target=target.target_fingerprint,
        tokenizer=target.tokenizer_fingerprint,
        node="bench",
        created_s=0,
        expiry_s=1,
        consent=0,
        policy_version=1,
        origin=Origin.SERVED,
        parent_trace_id=None,
        domain=domain,
        prompt_tokens=len(trace.prompt_ids_P),
        positions=trace.positions,
        body_bytes=0,
        ext=b"",
    )
