"""The administrator's routes: counters, speculation, erasure. Closed unless a key is configured."""

import math
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field

from draftkeep.config import MAX_LOOKAHEAD
from draftkeep.serve.engine.lookahead import Mode
from draftkeep.serve.http.access import AdminNode
from draftkeep.serve.http.openai_types import MAX_SUBJECT_CHARS

router = APIRouter(prefix="/admin")


class SpeculationBody(BaseModel):
    """Body of POST /admin/speculation."""

    model_config = ConfigDict(extra="forbid")

    mode: Mode
    lookahead: int | None = Field(default=None, ge=1, le=MAX_LOOKAHEAD)


class EraseBody(BaseModel):
    """Body of POST /admin/erase."""

    model_config = ConfigDict(extra="forbid")

    tenant: str
    subject: str = Field(min_length=1, max_length=MAX_SUBJECT_CHARS)


@router.get("/stats")
async def stats(node: AdminNode) -> dict[str, Any]:
    """Counters since start: engine, domains, capture, and what each tenant used."""
    stats = asdict(node.stats())
    # Beside the engine's counters and not among them: whoever looks wants these first.
    drafter, state = stats["engine"].pop("drafter"), stats["engine"].pop("speculation")
    plain: dict[str, Any] = _plain({**stats, "drafter": drafter or None, "speculation": state})
    return plain


@router.post("/speculation")
async def speculation(body: SpeculationBody, node: AdminNode) -> dict[str, Any]:
    """Change how the engine speculates, between two steps.

    Under the coupled rule no output depends on it; under the rejection rule outputs do for a given
    seed, and only their distribution does not.
    """
    lookahead = node.set_speculation(body.mode, body.lookahead)
    return {"mode": body.mode, "lookahead": lookahead}


@router.post("/erase")
async def erase(body: EraseBody, node: AdminNode) -> dict[str, Any]:
    """Erase a subject: plan, keys, then this node's caches and drafter."""
    result = await node.errands.run(lambda: node.erase(body.tenant, body.subject))
    plain: dict[str, Any] = _plain(asdict(result))
    return plain


def _plain(value: Any) -> Any:
    """JSON has no bytes and no NaN."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
