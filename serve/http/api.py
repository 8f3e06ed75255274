"""The OpenAI-compatible routes.

A request is authenticated, validated, asked for its consent, submitted to the engine and answered
whole or as a stream. A client that goes away frees its slots at once.
"""

from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool

from draftkeep.errors import InputError, NotFoundError, UnavailableError
from draftkeep.policies.tenant import TenantPolicy
from draftkeep.serve.http.access import ChatTenant, CompletionsTenant, NodeOf, TenantOf
from draftkeep.serve.http.answering import answer
from draftkeep.serve.http.openai_types import MAX_TOTAL_CHOICES, ChatRequest, CompletionRequest
from draftkeep.serve.http.prompting import (
    chat_prompt,
    completion_prompts,
    fewest_tokens,
    output_cap,
)
from draftkeep.serve.http.submitting import Prompt
from draftkeep.serve.node import Node

router = APIRouter()


@router.get("/v1/models")
async def models(node: NodeOf, tenant: TenantOf) -> dict[str, Any]:
    """The one model served here."""
    return {"object": "list", "data": [_model(node)]}


@router.get("/v1/models/{model_id:path}")
async def model(model_id: str, node: NodeOf, tenant: TenantOf) -> dict[str, Any]:
    """The model of that id."""
    _check_model(node, model_id)
    return _model(node)


@router.post("/v1/chat/completions")
async def chat(body: ChatRequest, request: Request, node: NodeOf, tenant: ChatTenant) -> Any:
    """Answers to one conversation."""
    _check(node, body)
    _peek(node, tenant, body, prompts=1)
    # In a thread: the template and the encoding of a long prompt would hold up every stream.
    ids = await run_in_threadpool(chat_prompt, node.target, body)
    cap = output_cap(ids, body.token_cap, max_context=node.max_context, param="messages")
    return await answer(node, tenant, request, body, [Prompt(ids=ids, cap=cap)])


@router.post("/v1/completions")
async def completions(
    body: CompletionRequest, request: Request, node: NodeOf, tenant: CompletionsTenant
) -> Any:
    """Completions of one prompt or of several."""
    _check(node, body)
    choices = len(body.prompt) * body.choices
    if choices > MAX_TOTAL_CHOICES:
        raise InputError(
            f"prompts times n is {choices}, expected at most {MAX_TOTAL_CHOICES}; send several "
            "requests",
            param="prompt",
        )
    _peek(node, tenant, body, prompts=len(body.prompt))
    encoded = await run_in_threadpool(completion_prompts, node.target, body)
    prompts = []
    for ids, text in encoded:
        cap = output_cap(ids, body.token_cap, max_context=node.max_context, param="prompt")
        prompts.append(Prompt(ids=ids, cap=cap, echo=text if body.echo else ""))
    return await answer(node, tenant, request, body, prompts)


def _check(node: Node, body: ChatRequest | CompletionRequest) -> None:
    body.refuse_unsupported()
    _check_model(node, body.model)
    if not node.ready:
        raise UnavailableError("this node takes no requests at the moment; try again later")


def _peek(
    node: Node, tenant: TenantPolicy, body: ChatRequest | CompletionRequest, *, prompts: int
) -> None:
    """Refuse a tenant at its limit, whose prompts are not worth reading."""
    fewest = fewest_tokens(body.choices, body.token_cap, max_context=node.max_context)
    node.limits.peek(tenant.name, choices=prompts * body.choices, tokens=prompts * fewest)


def _check_model(node: Node, name: str) -> None:
    if name != node.model_id:
        raise NotFoundError(f"that model is not served here; expected {node.model_id}")


def _model(node: Node) -> dict[str, Any]:
    return {
        "id": node.model_id,
        "object": "model",
        "created": int(node.started_s),
        "owned_by": "draftkeep",
    }
