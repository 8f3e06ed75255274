"""NodeStats: what the administrator and the metrics see of a node at one moment."""

from collections.abc import Mapping
from dataclasses import dataclass

from draftkeep.serve.capture import CaptureStats
from draftkeep.serve.engine.stats import EngineStats
from draftkeep.serve.outbox import ForwardingStats


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStats:
    """Counters since start, and the state of the moment.

    `target` is the served model's fingerprint. `groups` are the counts of finished requests by
    domain (`GroupCounts`), `tenants` what each tenant used of its limits (`Limits.usage`).
    `catalog_up` is whether the follower could read the catalog at its last poll. `forwarding` is
    what waits for Kafka, None where compactors read the node's own log.
    """

    target: bytes
    engine: EngineStats
    groups: Mapping[str, Mapping[str, int]]
    tenants: Mapping[str, Mapping[str, int]]
    capture: CaptureStats
    catalog_up: bool
    forwarding: ForwardingStats | None
