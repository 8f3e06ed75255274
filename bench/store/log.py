"""The node's side: appends to the embedded log, and the call that hands a trace over."""

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from bench.store.work import MB, Figure, Node, make_trace
from draftkeep.ingest.codec import encode_body
from draftkeep.ingest.emitter import Emitter
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.ingest.tables import RemapTable

_THREADS = 8
# Up to 64 traces make one append of an emitter; under moderate load it has fewer at hand.
_AT_ONCE = 16
_LONELY_THREADS = 32
_FLOOR_SYNCS = 60
_OFFERS_S = 250
_QUEUE = 1024
_WAIT_S = 60.0


def append_per_s(node: Node) -> list[Figure]:
    """Records a second in the log, all on disk, beside a bare file that is synced as often."""
    records = node.records(min(node.sizes.appends, node.sizes.traces))
    repeats = node.sizes.appends // len(records)
    groups = [records[at : at + _AT_ONCE] for at in range(0, len(records), _AT_ONCE)] * repeats
    with node.log() as log:
        seconds = _append(log, groups, _THREADS)
    with node.log() as log:
        alone = _append(log, [[record] for record in records], _LONELY_THREADS)
    sync_s = _sync_s(node.directory, records[: _THREADS * _AT_ONCE])
    conditions = {"record_bytes": len(records[0]), "synchronous": "FULL"}
    return [
        Figure(
            metric="append_per_s",
            value=sum(map(len, groups)) / seconds,
            unit="records/s",
            conditions=conditions | {"threads": _THREADS, "records_an_append": _AT_ONCE},
        ),
        Figure(
            metric="append_singly_per_s",
            value=len(records) / alone,
            unit="records/s",
            conditions=conditions | {"threads": _LONELY_THREADS, "records_an_append": 1},
        ),
        Figure(
            metric="append_floor_per_s",
            value=_THREADS * _AT_ONCE / sync_s,
            unit="records/s",
            against="a bare file, one fdatasync for what the threads hand over at once",
            conditions={"sync_ms": sync_s * 1000},
        ),
    ]


def _append(log: SqliteLog, groups: Sequence[Sequence[bytes]], threads: int) -> float:
    """Seconds until all groups are acknowledged, appended by so many threads."""

    def work(first: int) -> None:
        for group in groups[first::threads]:
            log.append(group)

    return _together(work, threads)


def _together(work: Callable[[int], None], threads: int) -> float:
    workers = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    started_s = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return time.perf_counter() - started_s


def _sync_s(directory: Path, records: Sequence[bytes]) -> float:
    """Seconds that writing and syncing these records at the end of a file takes, the median."""
    path = directory / "floor"
    seconds = []
    with path.open("wb", buffering=0) as file:
        for _ in range(_FLOOR_SYNCS):
            started_s = time.perf_counter()
            file.write(b"".join(records))
            os.fdatasync(file.fileno())
            seconds.append(time.perf_counter() - started_s)
    path.unlink()
    return float(np.median(seconds))


def emit_ms(node: Node) -> list[Figure]:
    """How long `offer` takes in a thread that multiplies matrices, beside one that makes JSON.

    The emitter's own thread packs, seals and appends meanwhile.
    """
    traces = [make_trace(seed) for seed in range(50)]
    stop = threading.Event()
    busy = threading.Thread(target=_chatter, args=(stop,))
    dropped: list[str] = []
    with node.log() as log:
        emitter = Emitter(
            node.sealer,
            log,
            encode=lambda trace: encode_body(trace, RemapTable.identity()),
            queue_traces=_QUEUE,
            on_drop=dropped.append,
        )
        busy.start()
        taken_ms = []
        started_s = time.perf_counter()
        for number in range(node.sizes.offers):
            _multiply_until(started_s + number / _OFFERS_S)
            trace, provenance = traces[number % len(traces)], node.provenance(number)
            before_s = time.perf_counter()
            emitter.offer(trace, provenance)
            taken_ms.append((time.perf_counter() - before_s) * 1000)
        stop.set()
        busy.join()
        emitter.flush(_WAIT_S)
        emitter.close(_WAIT_S)
    conditions = {
        "offers": node.sizes.offers,
        "offers_per_s": _OFFERS_S,
        "acknowledged": emitter.acknowledged,
        "dropped": len(dropped),
        "trace_mb_s": _OFFERS_S * len(node.records(1)[0]) / MB,
    }
    return [
        Figure(
            metric=f"emit_p{rank}_ms",
            value=float(np.percentile(taken_ms, rank)),
            unit="ms",
            conditions=conditions,
        )
        for rank in (50, 99)
    ]


def _chatter(stop: threading.Event) -> None:
    # What answering requests costs the interpreter, about half of one core.
    document = {"choices": [{"text": "word " * 50, "index": index} for index in range(20)]}
    while not stop.wait(0.002):
        for _ in range(20):
            json.loads(json.dumps(document))


def _multiply_until(due_s: float) -> None:
    left, right = np.ones((128, 128), np.float32), np.ones((128, 128), np.float32)
    while time.perf_counter() < due_s:
        np.matmul(left, right)
