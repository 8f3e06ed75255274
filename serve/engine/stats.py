"""EngineStats: one consistent picture of the engine's counters."""

from dataclasses import dataclass

from draftkeep.serve.engine.counters import Totals
from draftkeep.serve.engine.lookahead import SpeculationState
from draftkeep.serve.engine.verification import Verification


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats(Totals):
    """Totals since start, and what is going on at the moment.

    `drafter` is the digest of the running one, `drafter_lost` of one that was given up after a
    failing pass with no swap since; empty where there is none. `waiting` counts requests without a
    slot, those that had one before among them. `known` counts requests whose id is in use,
    `leaving` those of them that were asked to be dropped or to end and are still here.
    `decoder` tells how the target's layers run: "fused", or "stock: " and why its own modules do.
    `packed` is how many of its linear layers run over packed weights.
    `kv_used_share` is the part of all slots' positions that running requests fill.
    """

    slots: int
    running: int
    waiting: int
    known: int
    leaving: int
    drafter: bytes
    drafter_lost: bytes
    verification: Verification
    decoder: str
    packed: int
    kv_used_share: float
    speculation: SpeculationState
