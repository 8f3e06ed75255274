"""The arithmetic of docs/scaling.md: what a service of so many requests needs of each part."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

TRACE_BYTES = 10_000
TTL_S, PERIOD_S = 7 * 86400, 3600
SHARD_BYTES = 128 * 1024**2
BATCH_BYTES = 64 * 1024**2
REPLICAS = 3
# People: traces that one sends in a period that it is seen in, and such periods in a ttl.
TRACES_A_SUBJECT, PERIODS_A_SUBJECT = 5, 8
TENANTS, KEY_BUCKETS = 100, 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A service, by its requests and the share of them that is captured."""

    requests_s: int
    sampling_rate: float

    @property
    def traces_s(self) -> float:
        """Captured traces a second."""
        return self.requests_s * self.sampling_rate

    @property
    def mb_s(self) -> float:
        """What they weigh in the log, MB/s."""
        return self.traces_s * TRACE_BYTES / 1e6

    @property
    def first_uses_s(self) -> float:
        """New (subject, period) pairs a second."""
        return self.traces_s / TRACES_A_SUBJECT

    @property
    def aliases(self) -> float:
        """(subject, period) pairs that live at once."""
        return self.first_uses_s * TTL_S

    @property
    def shards(self) -> float:
        """Merged shards that live at once; no bucket has fewer than one."""
        a_bucket = max(1.0, self.mb_s * 1e6 * PERIOD_S / SHARD_BYTES)
        return a_bucket * TTL_S / PERIOD_S


LOADS = (
    Load(requests_s=1000, sampling_rate=1.0),
    Load(requests_s=100_000, sampling_rate=0.01),
    Load(requests_s=100_000, sampling_rate=0.1),
    Load(requests_s=100_000, sampling_rate=1.0),
)
Values = Mapping[str, float]


def lines() -> list[tuple[str, Callable[[Load, Values], str]]]:
    """The lines of the table, each a function of a load and of the figures."""
    return [
        ("captured traces/s", lambda load, v: short(load.traces_s)),
        ("MB/s in the log", lambda load, v: short(load.mb_s)),
        ("cores that seal, on the serving nodes", lambda load, v: short(_seal(load, v))),
        ("forwarders at full speed", lambda load, v: short(load.mb_s / v["forwarder"])),
        ("compactor cores", lambda load, v: short(load.mb_s / v["compactor"])),
        ("partitions", lambda load, v: str(_partitions(load, v))),
        ("brokers' disks, three replicas, a ttl", lambda load, v: _size(load.mb_s * _KEPT)),
        ("shards' disks or buckets", lambda load, v: _size(load.mb_s * 1e6 * TTL_S)),
        ("shards in an expiry bucket", lambda load, v: short(load.shards * PERIOD_S / TTL_S)),
        ("shards", lambda load, v: short(load.shards)),
        ("object store: PUT, GET, DELETE a second", lambda load, v: short(_requests(load))),
        ("sweep with nothing to do, s", lambda load, v: short(_sweep(load, v))),
        ("catalog: traces", lambda load, v: short(load.traces_s * TTL_S)),
        ("catalog: bytes", lambda load, v: _size(load.traces_s * TTL_S * v["row"])),
        ("catalog: busy, of one connection", lambda load, v: _percent(_catalog(load, v))),
        ("an expiry bucket's traces", lambda load, v: short(load.traces_s * PERIOD_S)),
        ("its expiry, s", lambda load, v: short(_expiry(load, v))),
        ("keyring: aliases", lambda load, v: short(load.aliases)),
        ("keyring: subjects", lambda load, v: short(load.aliases / PERIODS_A_SUBJECT)),
        ("keyring: periods", lambda load, v: short(TENANTS * TTL_S / PERIOD_S)),
        ("keyring: bytes", lambda load, v: _size(load.aliases * v["key"])),
        ("keyring: busy with first uses", lambda load, v: _percent(_first_uses(load, v))),
        ("keyring: ending an hour's keys, s", lambda load, v: short(_ending(load, v))),
        ("re-keying one of 1,024 buckets, s", lambda load, v: short(_rekeying(load, v))),
        ("erasing a subject: shards rewritten", lambda load, v: short(PERIODS_A_SUBJECT)),
        ("and core seconds", lambda load, v: short(_erasing(load, v))),
    ]


# The topic keeps 22 parts of 24 of a ttl and its last segment one more.
_KEPT = 1e6 * TTL_S * 23 / 24 * REPLICAS


def _seal(load: Load, v: Values) -> float:
    return load.traces_s * v["seal"] / 1e6


def _partitions(load: Load, v: Values) -> int:
    """Twice the compactors that are needed, so that a part of them can catch up."""
    return max(3, 2 * math.ceil(load.mb_s / v["compactor"]))


def _requests(load: Load) -> float:
    """A shard is written from a batch, and written, read and removed once more by a merge."""
    batches_s = load.mb_s * 1e6 / BATCH_BYTES
    merged_s = load.mb_s * 1e6 / SHARD_BYTES
    return batches_s * 3 + merged_s * 2


def _sweep(load: Load, v: Values) -> float:
    return load.shards / 100_000 * v["sweep"] / 1000


def _catalog(load: Load, v: Values) -> float:
    return load.traces_s * (v["commit"] + v["swap"]) / 1e6


def _expiry(load: Load, v: Values) -> float:
    return load.traces_s * PERIOD_S * v["expire"] / 1e6


def _first_uses(load: Load, v: Values) -> float:
    return load.first_uses_s * v["first_use"] / 1e3


def _ending(load: Load, v: Values) -> float:
    return load.first_uses_s * PERIOD_S * v["end"] / 1e6


def _rekeying(load: Load, v: Values) -> float:
    """The rows of one bucket, and the bucket keys under a new root."""
    rows = load.aliases * (1 + 1 / PERIODS_A_SUBJECT) / KEY_BUCKETS
    return (rows + KEY_BUCKETS) * v["wrap"] / 1e6


def _erasing(load: Load, v: Values) -> float:
    return PERIODS_A_SUBJECT * SHARD_BYTES / TRACE_BYTES * v["rewrite"] / 1e6


def short(value: float) -> str:
    """Two or three digits and a unit of thousands."""
    for limit, letter in ((1e15, " P"), (1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= limit * 0.9995:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def _size(value: float) -> str:
    shown = short(value)
    return f"{shown}B" if " " in shown else f"{shown} B"


def _percent(share: float) -> str:
    return f"{100 * share:,.2g} %" if share < 0.1 else f"{100 * share:,.0f} %"


def load_table(values: Values) -> str:
    """What each load needs, as Markdown."""
    heads = [f"{short(load.requests_s)} requests/s, rate {load.sampling_rate:g}" for load in LOADS]
    found = [f"| | {' | '.join(heads)} |", "| --- |" + " ---: |" * len(LOADS)]
    for text, function in lines():
        cells = [function(load, values) for load in LOADS]
        found.append(f"| {text} | {' | '.join(cells)} |")
    return "\n".join(found)
