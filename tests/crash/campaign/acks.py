"""The witness: which traces were acknowledged, written by the nodes and read by the counter.

Each life of a node has a file of its own, so a killed one cannot spoil what the next one writes.
"""

import os
from collections.abc import Iterable
from pathlib import Path

_ID_BYTES = 16


class AckFile:
    """Ids of acknowledged traces, on disk before `write` returns."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND)

    def write(self, traces: Iterable[tuple[bytes, bool]]) -> None:
        """Trace ids, each with whether its subject may be erased."""
        os.write(self._fd, b"".join(trace_id + bytes([doomed]) for trace_id, doomed in traces))
        os.fsync(self._fd)


def read_acks(directory: Path, node: str) -> dict[bytes, bool]:
    """Every trace of a node that was acknowledged, with whether it may be erased."""
    acks: dict[bytes, bool] = {}
    for path in directory.glob(f"{node}.*"):
        data = path.read_bytes()
        for start in range(0, len(data) - _ID_BYTES, _ID_BYTES + 1):
            acks[data[start : start + _ID_BYTES]] = bool(data[start + _ID_BYTES])
    return acks
