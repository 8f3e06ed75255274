"""EngineStats: one consistent picture of the engine's counters."""

from dataclasses import dataclass

from draftkeep.serve.lookahead import SpeculationState


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since start, and what is going on at the moment.

    `steps` are passes of the whole batch, `row_steps` their sum over requests. `tested` and
    `accepted` count drafts compared with the target's token and found equal; `drafted` counts all
    that were proposed. `capture_failed` counts requests whose distributions were given up,
    `callback_failed` exceptions raised by the callers' functions,
    `drafter_failed` drafters given up after a failing pass.
    """

    slots: int
    running: int
    waiting: int
    steps: int
    row_steps: int
    prompt_tokens: int
    output_tokens: int
    drafted: int
    tested: int
    accepted: int
    finished: int
    cancelled: int
    failed: int
    capture_failed: int
    callback_failed: int
    drafter_failed: int
    drafter: bytes
    speculation: SpeculationState
