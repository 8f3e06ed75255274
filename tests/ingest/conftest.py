"""The real parts around an emitter, a log that does as it is told, and logs with a set clock."""

import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from draftkeep.breaker import Breaker
from draftkeep.config import RetentionConfig
from draftkeep.ingest.codec import decode_body, encode_body
from draftkeep.ingest.emitter import Emitter
from draftkeep.ingest.envelope import Opener, Sealer
from draftkeep.ingest.log import Log, LogRecord, PartitionId
from draftkeep.ingest.record import decode_record
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.ingest.tables import RemapTable, only_identity
from draftkeep.ingest.trace import Trace
from draftkeep.policies.keyring import Keyring
from draftkeep.policies.signing import SigningKey
from tests.clock import Clock
from tests.ingest.traces import NOW_S, make_provenance, make_topk, make_trace

LONG_S = 60.0
EVERYTHING = (10**6, 10**9)


class Witness:
    """What an emitter told the outside."""

    def __init__(self) -> None:
        self.drops: list[str] = []
        self.acknowledged: list[bytes] = []

    def count(self, reason: str) -> int:
        return self.drops.count(reason)


class HeldLog:
    """A log that keeps every append waiting until it is released, then does as it is told."""

    def __init__(self, error: Exception | None = None, *, released: bool = False) -> None:
        self.error = error
        self.reached = threading.Event()
        self.release = threading.Event()
        self.records: list[bytes] = []
        self.appends = 0
        if released:
            self.release.set()

    name = "held"

    def append(self, records: Sequence[bytes]) -> int:
        self.appends += 1
        self.reached.set()
        assert self.release.wait(LONG_S)
        if self.error is not None:
            raise self.error
        self.records += records
        return len(self.records) - len(records)

    def read(self, start: int, limit_records: int, limit_bytes: int) -> list[LogRecord]:
        raise NotImplementedError

    def free(self, up_to: int) -> None:
        raise NotImplementedError

    def bounds(self) -> tuple[int, int]:
        return (0, len(self.records))

    def size_bytes(self) -> int:
        return sum(map(len, self.records))

    def identity(self) -> PartitionId:
        return PartitionId(cluster="cluster", topic_id="topic", partition=0)

    def close(self) -> None:
        self.release.set()


def encode_plain(trace: Trace) -> bytes:
    return encode_body(trace, RemapTable.identity())


class Bench:
    """The real parts around an emitter, in one directory, at one fixed time."""

    now_s = float(NOW_S)
    topk = staticmethod(make_topk)
    trace = staticmethod(make_trace)
    provenance = staticmethod(make_provenance)
    encode = staticmethod(encode_plain)
    held_log = HeldLog

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.keyring = Keyring.open(
            directory / "keys", retention=RetentionConfig(), clock=lambda: float(NOW_S)
        )
        self.signing = SigningKey(b"s" * 32)
        self.sealer = Sealer(
            self.keyring.node_keys(), "node-1", self.signing, clock=lambda: float(NOW_S)
        )
        self.witness = Witness()
        self._closing: list[Callable[[], None]] = [self.keyring.close]

    def log(self) -> SqliteLog:
        log = SqliteLog(
            self.directory / "log", cap_bytes=2**30, bucket_s=600, clock=lambda: float(NOW_S)
        )
        self._closing.append(log.close)
        return log

    def emitter(
        self,
        log: Log,
        *,
        sealer: Sealer | None = None,
        encode: Callable[[Trace], bytes] | None = None,
        queue_traces: int = 1000,
        breaker: Breaker | None = None,
    ) -> Emitter:
        emitter = Emitter(
            sealer if sealer is not None else self.sealer,
            log,
            encode=encode if encode is not None else encode_plain,
            queue_traces=queue_traces,
            on_drop=self.witness.drops.append,
            on_ack=self.witness.acknowledged.append,
            breaker=breaker if breaker is not None else Breaker(threshold=10**6),
        )
        self._closing.append(lambda: emitter.close(0))
        return emitter

    def open_all(self) -> dict[bytes, Trace]:
        """Every trace in the log by trace id, opened with the job's keys."""
        opener = Opener(
            self.keyring.job_keys(), lambda _: self.signing.public, clock=lambda: float(NOW_S)
        )
        records = SqliteLog.open_reader(self.directory / "log").read(0, *EVERYTHING)
        sealed = [decode_record(record.data) for record in records]
        return {
            item.parsed.trace_id: decode_body(opener.open(item), only_identity) for item in sealed
        }

    def close(self) -> None:
        for close in reversed(self._closing):
            close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "traces"


@pytest.fixture
def open_log(directory: Path, clock: Clock) -> Callable[..., SqliteLog]:
    """Opens the log in `directory` for writing, one file for every ten seconds of `clock`."""

    def open_(cap_bytes: int = 2**30) -> SqliteLog:
        return SqliteLog(directory, cap_bytes=cap_bytes, bucket_s=10, clock=clock)

    return open_


def run_child(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Start a Python process that runs `code`; its output is a pipe."""
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
