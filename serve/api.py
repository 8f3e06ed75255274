"""The OpenAI-compatible routes.

A request is authenticated, validated, asked for its consent, submitted to the engine and answered
whole or as a stream. A client that goes away frees its slot at once.
"""

import asyncio
import json
import random
import secrets
from collections.abc import AsyncIterator
from typing import Any

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import JSONResponse

from draftkeep.errors import DraftkeepError, NotFoundError, UnavailableError
from draftkeep.ingest.trace import Provenance
from draftkeep.policies.tenant import TenantPolicy
from draftkeep.serve import http_errors
from draftkeep.serve.access import ChatTenant, CompletionsTenant, NodeOf, TenantOf
from draftkeep.serve.capture import CaptureTag
from draftkeep.serve.detokenize import Detokenizer
from draftkeep.serve.event_stream import EventStream
from draftkeep.serve.generation import Generation
from draftkeep.serve.node import Node
from draftkeep.serve.openai_types import ChatRequest, CompletionRequest
from draftkeep.serve.prompting import (
    chat_prompt,
    completion_prompt,
    output_cap,
    sampling_of,
    seed_of,
)
from draftkeep.serve.request import Finish
from draftkeep.serve.request import Request as EngineRequest
from draftkeep.serve.responses import Reply

router = APIRouter()
_coin = random.SystemRandom()


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
    """One chat answer."""
    _check(node, body)
    # In a thread: the template and the encoding of a long prompt would hold up every stream.
    prompt_ids = await run_in_threadpool(chat_prompt, node.target, body)
    cap = output_cap(prompt_ids, body.token_cap, max_context=node.max_context, param="messages")
    return await _answer(node, tenant, request, body, prompt_ids, cap)


@router.post("/v1/completions")
async def completions(
    body: CompletionRequest, request: Request, node: NodeOf, tenant: CompletionsTenant
) -> Any:
    """One completion."""
    _check(node, body)
    prompt_ids = await run_in_threadpool(completion_prompt, node.target, body)
    cap = output_cap(prompt_ids, body.token_cap, max_context=node.max_context, param="prompt")
    return await _answer(node, tenant, request, body, prompt_ids, cap)


def _check(node: Node, body: ChatRequest | CompletionRequest) -> None:
    body.refuse_unsupported()
    _check_model(node, body.model)
    if not node.ready:
        raise UnavailableError("the engine is not running; try again later")


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


async def _answer(
    node: Node,
    tenant: TenantPolicy,
    request: Request,
    body: ChatRequest | CompletionRequest,
    prompt_ids: tuple[int, ...],
    cap: int,
) -> Any:
    reply = Reply(
        chat=isinstance(body, ChatRequest),
        response_id=secrets.token_bytes(16),
        created_s=int(node.now_s()),
        model=node.model_id,
        fingerprint=f"fp_{node.target.target_fingerprint.hex()[:16]}",
        prompt_tokens=len(prompt_ids),
    )
    sampling, seed = sampling_of(node.target, body), seed_of(body)
    tag = _capture_tag(node, tenant, body, reply)
    generation = Generation(node.engine, tag.delivery if tag is not None else None)
    generation.start(
        EngineRequest(
            request_id=reply.response_id.hex(),
            prompt_ids=prompt_ids,
            sampling=sampling,
            seed=seed,
            max_tokens=cap,
            on_tokens=generation.on_tokens,
            on_error=generation.on_error,
            group=tenant.domain_for(body.domain) or "unknown",
            capture=tag is not None,
            tag=tag,
        )
    )
    if body.stream:
        with_usage = body.stream_options is not None and body.stream_options.include_usage
        return EventStream(_stream(node, generation, reply, with_usage=with_usage), generation)
    return await _whole(node, generation, reply, request)


def _capture_tag(
    node: Node, tenant: TenantPolicy, body: ChatRequest | CompletionRequest, reply: Reply
) -> CaptureTag | None:
    decision = tenant.capture_decision(
        store=body.store, coin=_coin.random(), sampling_rate=node.sampling_rate
    )
    if not decision.allowed:
        node.capture.refused(decision.reason.value)
        return None
    return node.capture.admit(
        Provenance(
            tenant=tenant.name,
            subject=body.subject,
            response_id=reply.response_id,
            domain=tenant.domain_for(body.domain),
            consent=tenant.consent_ceiling,
            policy_version=tenant.policy_version,
            created_s=reply.created_s,
            target=node.target.target_fingerprint,
            tokenizer=node.target.tokenizer_fingerprint,
        )
    )


async def _whole(
    node: Node, generation: Generation, reply: Reply, request: Request
) -> JSONResponse:
    """Wait for the end, or for the client to leave, whichever is first."""
    gone = asyncio.ensure_future(_client_gone(request))
    answer = asyncio.ensure_future(_collect(node, generation, reply))
    delivered = False
    try:
        await asyncio.wait((gone, answer), return_when=asyncio.FIRST_COMPLETED)
        if not answer.done():
            return JSONResponse({}, status_code=499)
        response = JSONResponse(answer.result())
        delivered = not gone.done()
        return response
    finally:
        gone.cancel()
        answer.cancel()
        generation.close(delivered=delivered)


async def _client_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _collect(node: Node, generation: Generation, reply: Reply) -> dict[str, Any]:
    text, tokens = Detokenizer(node.target.tokenizer), 0
    parts: list[str] = []
    end = Finish.LENGTH
    async for ids, finish in generation.events():
        tokens += len(ids)
        parts.append(text.push(ids))
        end = finish if finish is not None else end
    return reply.whole("".join(parts) + text.flush(), end, tokens)


async def _stream(
    node: Node, generation: Generation, reply: Reply, *, with_usage: bool
) -> AsyncIterator[str]:
    """Server-sent events, one per token: an event per step would tell what was accepted.

    An error after the first event is an event of its own. The stream's owner closes `generation`.
    """
    text, tokens = Detokenizer(node.target.tokenizer), 0
    try:
        if reply.chat:
            yield _event(reply.chunk("", None, first=True, with_usage=with_usage))
        async for ids, finish in generation.events():
            tokens += len(ids)
            for token in ids:
                yield _event(
                    reply.chunk(text.push([token]), None, first=False, with_usage=with_usage)
                )
            if finish is not None:
                rest = text.flush()
                yield _event(reply.chunk(rest, finish, first=False, with_usage=with_usage))
        if with_usage:
            yield _event(reply.usage_chunk(tokens))
    except DraftkeepError as error:
        yield _event(http_errors.error_body(error)[1])
    yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, separators=(',', ':'))}\n\n"
