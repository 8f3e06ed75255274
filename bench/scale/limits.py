"""Where each part stops, as the captured traces a second at which it does."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from bench.scale.load import SHARD_BYTES, TRACE_BYTES, TRACES_A_SUBJECT, TTL_S, short

_DATABASE_BYTES = 1e12
_PASS_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A part, what of it is full, and the traces a second that fill it."""

    part: str
    full: str
    traces_s: Callable[[Mapping[str, float]], float]
    then: str


LIMITS = (
    Limit(
        part="one node's embedded log",
        full="synced appends, one writer",
        traces_s=lambda v: v["append"],
        then="more nodes: each has its own",
    ),
    Limit(
        part="one node's forwarder",
        full="one process",
        traces_s=lambda v: v["forwarder"] * 1e6 / TRACE_BYTES,
        then="more nodes: each has its own",
    ),
    Limit(
        part="one compactor, one partition",
        full="a core; a partition has one reader",
        traces_s=lambda v: v["compactor"] * 1e6 / TRACE_BYTES,
        then="partitions, and as many compactors; a topic is made with them",
    ),
    Limit(
        part="keyring, first uses",
        full="one synced commit each, one writer",
        traces_s=lambda v: TRACES_A_SUBJECT * 1e3 / v["first_use"],
        then="a lower sampling rate, longer periods, or a keyring for each group of tenants",
    ),
    Limit(
        part="keyring, ends of periods",
        full="a period's keys end as fast as they come",
        traces_s=lambda v: TRACES_A_SUBJECT * 1e6 / v["end"],
        then="as above",
    ),
    Limit(
        part="catalog in SQLite, commits",
        full="one writer",
        traces_s=lambda v: 1e6 / v["sqlite"],
        then="PostgreSQL",
    ),
    Limit(
        part="catalog in SQLite, expiry",
        full="trace ids end as fast as they come; others write in between",
        traces_s=lambda v: 1e6 / v["expire"],
        then="PostgreSQL",
    ),
    Limit(
        part="catalog in PostgreSQL, one connection",
        full="commits and swaps one after another",
        traces_s=lambda v: 1e6 / (v["commit"] + v["swap"]),
        then="as many connections as compactors, until its disk is full",
    ),
    Limit(
        part="catalog in PostgreSQL, size",
        full="1 TB of trace ids",
        traces_s=lambda v: _DATABASE_BYTES / v["row"] / TTL_S,
        then="`trace_ids` partitioned by bucket, a shorter ttl, or a catalog for each tenant group",
    ),
    Limit(
        part="sweeper",
        full="a pass with nothing to do takes a minute",
        traces_s=lambda v: _PASS_S * 1e3 / v["sweep"] * 100_000 * SHARD_BYTES / TRACE_BYTES / TTL_S,
        then="larger shards, or passes further apart",
    ),
)


def limit_table(values: Mapping[str, float]) -> str:
    """The parts in the order in which they stop, as Markdown."""
    found = ["| part | full when | traces/s | then |", "| --- | --- | ---: | --- |"]
    for limit in sorted(LIMITS, key=lambda limit: limit.traces_s(values)):
        stops = short(limit.traces_s(values))
        found.append(f"| {limit.part} | {limit.full} | {stops} | {limit.then} |")
    return "\n".join(found)
