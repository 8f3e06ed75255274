"""Bytes a position, accuracy and speed of the body codec, beside naive Parquet lists.

    python -m bench.codec [--quick]

Real completions at temperatures 0.7 to 1.0, k = 32, each trace packed on its own as it is when
sealed. Exits with 1 where a bound is missed.

Suffixes: T positions, K list entries, C the k + 1 categories (the list and the mass outside it).
"""

import argparse
import io
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from bench.codec.traces import K, sampled_traces
from bench.results import RESULTS_DIR, Row, append_rows
from draftkeep.ingest.codec import decode_body, encode_body
from draftkeep.ingest.header import HEADER_VERSION, Header
from draftkeep.ingest.record import ENVELOPE_BYTES, RECORD_OVERHEAD_BYTES
from draftkeep.ingest.tables import RemapTable, only_identity
from draftkeep.ingest.trace import TopK, Trace
from draftkeep.store.models.target import load_target

BOUND_BYTES = 75.0
BOUND_KL = 1e-4
FULL_BATCHES, QUICK_BATCHES = 8, 2
SEED = 11
ROUNDS = 5
BESIDE = "pyarrow list<int32>, list<float32>, default compression"
_PACKAGES = ("numpy", "pyarrow", "torch", "transformers", "zstandard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes a position. The first two are compared; the rest is what they leave out."""

    body: float
    envelope: float
    header: float
    prompt: float
    log_only: float
    parquet: float
    parquet_zstd: float


def measure_sizes(traces: Sequence[Trace]) -> Sizes:
    """Sizes of traces packed one by one, and of all their lists in one Parquet file."""
    positions = sum(trace.positions for trace in traces)
    whole = sum(len(encode_body(trace, RemapTable.identity())) for trace in traces)
    body = sum(len(body) for body in _bodies([_without_prompt(trace) for trace in traces]))
    return Sizes(
        body=body / positions,
        envelope=ENVELOPE_BYTES * len(traces) / positions,
        header=sum(len(_header(trace).encode()) for trace in traces) / positions,
        prompt=(whole - body) / positions,
        log_only=(RECORD_OVERHEAD_BYTES - ENVELOPE_BYTES) * len(traces) / positions,
        parquet=_parquet_bytes(traces) / positions,
        parquet_zstd=_parquet_bytes(traces, compression="zstd") / positions,
    )


def divergences(traces: Sequence[Trace]) -> NDArray[np.float64]:
    """KL(original, decoded) of each position over the k + 1 categories, in nats."""
    kl = []
    for trace, body in zip(traces, _bodies(traces), strict=True):
        p_TC, q_TC = (
            _categories(topk) for topk in (trace.topk, decode_body(body, only_identity).topk)
        )
        with np.errstate(divide="ignore", invalid="ignore"):
            kl.append(np.where(p_TC > 0, p_TC * np.log(p_TC / q_TC), 0.0).sum(axis=1))
    return np.concatenate(kl)


def positions_per_cpu_s(traces: Sequence[Trace], work: Callable[[], object]) -> float:
    """Positions handled in one CPU-second of one thread, the best of a few rounds."""
    best_s = float("inf")
    for _ in range(ROUNDS):
        start_s = time.process_time()
        work()
        best_s = min(best_s, time.process_time() - start_s)
    return sum(trace.positions for trace in traces) / best_s


def _bodies(traces: Sequence[Trace]) -> list[bytes]:
    return [encode_body(trace, RemapTable.identity()) for trace in traces]


def _without_prompt(trace: Trace) -> Trace:
    return replace(trace, prompt_ids_P=trace.prompt_ids_P[:0])


def _categories(topk: TopK) -> NDArray[np.float64]:
    logs_TC = np.concatenate([topk.logprobs_TK, topk.tail_T[:, None]], axis=1).astype(np.float64)
    masses_TC: NDArray[np.float64] = np.exp(logs_TC)
    masses_TC /= masses_TC.sum(axis=1, keepdims=True)
    return masses_TC


def _header(trace: Trace) -> Header:
    return Header(
        version=HEADER_VERSION,
        trace_id=bytes(16),
        request_id=bytes(16),
        tenant="tenant-1",
        period_id=bytes(16),
        alias=bytes(16),
        subject_kind=1,
        share_id=bytes(16),
        target=bytes(32),
        tokenizer=bytes(32),
        node="node-1",
        created_s=1_800_000_000,
        expiry_s=1_800_604_800,
        consent=0,
        policy_version=1,
        origin=0,
        parent_trace_id=None,
        domain="chat",
        prompt_tokens=len(trace.prompt_ids_P),
        positions=trace.positions,
        body_bytes=9000,
        ext=b"",
    )


def _parquet_bytes(traces: Sequence[Trace], **options: str) -> int:
    ids = [row.tolist() for trace in traces for row in trace.topk.ids_TK]
    logprobs = [row.tolist() for trace in traces for row in trace.topk.logprobs_TK]
    tails = np.concatenate([trace.topk.tail_T for trace in traces])
    tokens = np.concatenate([trace.output_ids_T for trace in traces])
    table = pa.table(
        {
            "ids": pa.array(ids, pa.list_(pa.int32())),
            "logprobs": pa.array(logprobs, pa.list_(pa.float32())),
            "tail": tails,
            "token": tokens,
        }
    )
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    return sink.tell()


def _report(traces: Sequence[Trace], console: Console) -> tuple[list[Row], bool]:
    sizes = measure_sizes(traces)
    kl = divergences(traces)
    bare = [_without_prompt(trace) for trace in traces]
    bodies = _bodies(bare)
    encode = positions_per_cpu_s(bare, lambda: _bodies(bare))
    decode = positions_per_cpu_s(bare, lambda: [decode_body(b, only_identity) for b in bodies])
    sealed = sizes.body + sizes.envelope
    rows = [
        Row(metric="body and envelope, empty prompt", value=sealed, unit="B/position"),
        Row(metric="Parquet lists, default", value=sizes.parquet, unit="B/position"),
        Row(metric="Parquet lists, zstd", value=sizes.parquet_zstd, unit="B/position"),
        Row(metric="size ratio", value=sealed / sizes.parquet, unit="ratio", against=BESIDE),
        Row(metric="header", value=sizes.header, unit="B/position"),
        Row(metric="prompt ids", value=sizes.prompt, unit="B/position"),
        Row(metric="encapsulation, in the log only", value=sizes.log_only, unit="B/position"),
        Row(metric="mean KL over k+1", value=float(kl.mean()), unit="nat"),
        Row(metric="max KL over k+1", value=float(kl.max()), unit="nat"),
        Row(metric="encode", value=encode, unit="positions/CPU-s"),
        Row(metric="decode", value=decode, unit="positions/CPU-s"),
    ]
    positions = sum(trace.positions for trace in traces)
    table = Table(title=f"{len(traces)} traces, {positions} positions, k = {K}")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_column("unit")
    for row in rows:
        table.add_row(
            row.metric, f"{row.value:,.4g}" if row.value < 1e3 else f"{row.value:,.0f}", row.unit
        )
    console.print(table)
    held = sealed <= BOUND_BYTES and float(kl.mean()) <= BOUND_KL
    verdict = "held" if held else "MISSED"
    console.print(f"bounds {BOUND_BYTES:g} B/position and mean KL {BOUND_KL:g}: {verdict}")
    return rows, held


def main(arguments: Sequence[str]) -> int:
    """Run the bench; returns the exit status."""
    parser = argparse.ArgumentParser(prog="bench.codec", description="Measure the body codec.")
    parser.add_argument("--quick", action="store_true", help="fewer traces")
    parser.add_argument("--target", default="smollm2", help="a packaged name or a directory")
    parser.add_argument("--cache-dir", type=Path, default=None)
    parser.add_argument("--results-dir", type=Path, default=RESULTS_DIR)
    options = parser.parse_args(arguments)
    batches = QUICK_BATCHES if options.quick else FULL_BATCHES
    target = load_target(options.target, cache_dir=options.cache_dir)
    traces = list(sampled_traces(target, batches=batches, seed=SEED))
    rows, held = _report(traces, Console())
    append_rows(
        "codec",
        rows,
        conditions={
            "target": target.name,
            "target_fingerprint": target.target_fingerprint.hex(),
            "traces": len(traces),
            "positions": sum(trace.positions for trace in traces),
            "k": K,
            "seed": SEED,
            "quick": options.quick,
        },
        packages=_PACKAGES,
        clock=time.time,
        directory=options.results_dir,
    )
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
