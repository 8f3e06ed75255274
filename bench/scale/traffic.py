"""Synthetic headers: what a service's traffic leaves in a catalog, a function of a seed.

Traces come in the order of time, `per_bucket` to each period. A subject sends five in a period on
average, and belongs to one of `tenants`; all tenants' periods begin and end together, so one period
is one expiry bucket. Ids are random bytes, as real ones are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from draftkeep.ingest.header import HEADER_VERSION, Header
from draftkeep.policies.retention import PeriodRecord
from draftkeep.store.shard import CLEAR_SCHEMA

PERIOD_S = 3600
TTL_S = 7 * 86400
START_S = 1_800_000_000 // PERIOD_S * PERIOD_S
TARGET = b"T" * 32
TRACES_A_SUBJECT = 5
# What a trace's shard would hold of it; no body is made.
TRACE_BYTES = 10_000
DOMAINS = (None, "chat", "code", "sql")
_TOKENIZER = b"K" * 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Headers [first, first + len) of one expiry bucket, in the order of a shard's rows."""

    first: int
    bucket_s: int
    columns: Mapping[str, Sequence[Any]]

    def __len__(self) -> int:
        return len(self.columns["trace_id"])

    def trace_rows(self) -> list[dict[str, Any]]:
        """Rows of `trace_ids` but for their shard, in the order the compactor inserts them in."""
        column = self.columns
        rows = [
            {
                "bucket_s": self.bucket_s,
                "trace_id": trace_id,
                "node": node,
                "digest": digest,
                "tenant": tenant,
                "alias": alias,
                "period_id": period_id,
                "positions": positions,
            }
            for trace_id, node, digest, tenant, alias, period_id, positions in zip(
                column["trace_id"],
                column["node"],
                column["digest"],
                column["tenant"],
                column["alias"],
                column["period_id"],
                column["positions"],
                strict=True,
            )
        ]
        rows.sort(key=lambda row: row["trace_id"])
        return rows

    def headers(self) -> list[Header]:
        """The same as headers."""
        names = CLEAR_SCHEMA.names
        values = zip(*(self.columns[name] for name in names), strict=True)
        return [Header(**dict(zip(names, row, strict=True))) for row in values]

    def table(self) -> pa.Table:
        """The clear columns of a shard with these rows."""
        return pa.table(
            {name: self.columns[name] for name in CLEAR_SCHEMA.names}, schema=CLEAR_SCHEMA
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """All headers there are, by number."""

    per_bucket: int
    tenants: int = 20
    nodes: int = 8
    seed: int = 1

    def tenant_names(self) -> list[str]:
        """The tenants, in an order of their own."""
        return [f"tenant-{number:02}" for number in range(self.tenants)]

    def node_names(self) -> list[str]:
        """The serving nodes."""
        return [f"node-{number}" for number in range(self.nodes)]

    def bucket_of(self, number: int) -> int:
        """The number of the expiry bucket that a header falls into."""
        return number // self.per_bucket

    def expiry_s(self, bucket: int) -> int:
        """When a bucket expires, Unix seconds."""
        return START_S + bucket * PERIOD_S + TTL_S

    def created_s(self, number: int) -> int:
        """When the trace under a header was made, Unix seconds."""
        return START_S + number * PERIOD_S // self.per_bucket

    def period(self, bucket: int, tenant: int) -> PeriodRecord:
        """A tenant's period record; nobody signed it, and nothing opens under it."""
        start_s = START_S + bucket * PERIOD_S
        draw = np.random.default_rng((self.seed, 2, bucket, tenant))
        return PeriodRecord(
            tenant=self.tenant_names()[tenant],
            period_id=self._period_ids(bucket)[tenant],
            start_s=start_s,
            destroy_at_s=start_s + TTL_S,
            public_key=draw.bytes(1216),
            signature=draw.bytes(64),
        )

    def batches(self, first: int, count: int) -> list[Batch]:
        """Headers [first, first + count), one batch for each expiry bucket they fall into."""
        found = []
        while count:
            bucket = self.bucket_of(first)
            taken = min(count, (bucket + 1) * self.per_bucket - first)
            found.append(self._batch(first, taken, bucket))
            first, count = first + taken, count - taken
        return found

    def _batch(self, first: int, count: int, bucket: int) -> Batch:
        draw = np.random.default_rng((self.seed, 0, first, count))
        subjects = draw.integers(0, self._subjects, count)
        domains = draw.integers(0, len(DOMAINS), count)
        tenants = subjects % self.tenants
        # As a shard is sorted: tenant, domain (null first), created.
        order = np.lexsort((np.arange(count), domains, tenants))
        subjects, domains, tenants = subjects[order], domains[order], tenants[order]
        aliases, period_ids = self._aliases(bucket), self._period_ids(bucket)
        names, nodes = self.tenant_names(), self.node_names()
        positions = draw.integers(16, 512, count)
        return Batch(
            first=first,
            bucket_s=self.expiry_s(bucket),
            columns={
                "version": [HEADER_VERSION] * count,
                "trace_id": _ids(draw, count, 16),
                "request_id": _ids(draw, count, 16),
                "digest": _ids(draw, count, 32),
                "tenant": [names[index] for index in tenants.tolist()],
                "period_id": [period_ids[index] for index in tenants.tolist()],
                "alias": [aliases[16 * i : 16 * i + 16] for i in subjects.tolist()],
                "subject_kind": [1] * count,
                "share_id": [period_ids[index] for index in tenants.tolist()],
                "target": [TARGET] * count,
                "tokenizer": [_TOKENIZER] * count,
                "node": [nodes[i] for i in draw.integers(0, self.nodes, count).tolist()],
                "created_s": self._created_s(first + order),
                "expiry_s": [self.expiry_s(bucket)] * count,
                "consent": [0] * count,
                "policy_version": [1] * count,
                "origin": [0] * count,
                "parent_trace_id": [None] * count,
                "domain": [DOMAINS[index] for index in domains.tolist()],
                "prompt_tokens": draw.integers(8, 2048, count).tolist(),
                "positions": positions.tolist(),
                "body_bytes": (40 * positions).tolist(),
                "ext": [b""] * count,
            },
        )

    @property
    def _subjects(self) -> int:
        return max(1, self.per_bucket // TRACES_A_SUBJECT)

    def _created_s(self, numbers: NDArray[np.int64]) -> list[int]:
        return [self.created_s(number) for number in numbers.tolist()]

    def _aliases(self, bucket: int) -> bytes:
        return _random_bytes((self.seed, 1, bucket), 16 * self._subjects)

    def _period_ids(self, bucket: int) -> list[bytes]:
        data = _random_bytes((self.seed, 3, bucket), 16 * self.tenants)
        return [data[16 * index : 16 * index + 16] for index in range(self.tenants)]


def _ids(draw: np.random.Generator, count: int, size: int) -> list[bytes]:
    data = draw.bytes(size * count)
    return [data[start : start + size] for start in range(0, size * count, size)]


@lru_cache(maxsize=8)
def _random_bytes(seed: tuple[int, ...], size: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)
