"""Answering one checked request, whole or as a stream."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Sequence

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from draftkeep.policies.tenant import TenantPolicy
from draftkeep.serve.http.chunks import Chunks
from draftkeep.serve.http.generation import Generation
from draftkeep.serve.http.logprobs import TokenBytes
from draftkeep.serve.http.obfuscation import Padding
from draftkeep.serve.http.openai_types import ChatRequest, CompletionRequest
from draftkeep.serve.http.pacing import Pacer
from draftkeep.serve.http.responses import Answer, Reply
from draftkeep.serve.http.sse_response import SseResponse, event_line
from draftkeep.serve.http.submitting import Prompt, submit, within_limit
from draftkeep.serve.node import Node


async def answer(
    node: Node,
    tenant: TenantPolicy,
    request: Request,
    body: ChatRequest | CompletionRequest,
    prompts: Sequence[Prompt],
) -> Response:
    """The response, whole or as a stream. `n` choices for each prompt, all under one seed.

    Raises what the tenant's limits and the engine's `submit` raise.
    """
    reply = _reply(node, request, body, prompts)
    prompts = within_limit(node, tenant, body, prompts)
    # Choice i of a prompt has the noise of choice i, whatever other prompts come with it.
    wanted = [(prompt, choice) for prompt in prompts for choice in range(body.choices)]
    generation = submit(node, tenant, body, reply, wanted)
    echoes = [prompt.echo for prompt, _ in wanted]
    if not body.stream:
        return await _whole(generation, reply, request, echoes)
    return SseResponse(_stream(node, generation, reply, body, echoes), generation)


def _reply(
    node: Node,
    request: Request,
    body: ChatRequest | CompletionRequest,
    prompts: Sequence[Prompt],
) -> Reply:
    spelling = None if body.alternatives is None else TokenBytes(node.target.tokenizer)
    return Reply(
        chat=isinstance(body, ChatRequest),
        response_id=bytes.fromhex(request.state.request_id),
        created_s=int(node.now_s()),
        model=node.model_id,
        fingerprint=f"fp_{node.target.target_fingerprint.hex()[:16]}",
        prompt_tokens=sum(len(prompt.ids) for prompt in prompts),
        token_bytes=spelling,
        with_usage=body.with_usage,
    )


async def _whole(
    generation: Generation, reply: Reply, request: Request, echoes: Sequence[str]
) -> JSONResponse:
    """Wait for the end, or for the client to leave, whichever is first."""
    gone = asyncio.ensure_future(_client_gone(request))
    collected = asyncio.ensure_future(_collect(generation, echoes))
    delivered = False
    try:
        await asyncio.wait((gone, collected), return_when=asyncio.FIRST_COMPLETED)
        if not collected.done():
            return JSONResponse({}, status_code=499)
        response = JSONResponse(reply.whole(collected.result()))
        delivered = not gone.done()
        return response
    finally:
        gone.cancel()
        collected.cancel()
        generation.close(delivered=delivered)


async def _client_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _collect(generation: Generation, echoes: Sequence[str]) -> list[Answer]:
    answers = [Answer(text=echo) for echo in echoes]
    async for index, update in generation.updates():
        one = answers[index]
        one.text += "".join(piece.text for piece in update.pieces) + update.tail
        one.pieces += update.pieces
        one.finish = update.finish if update.finish is not None else one.finish
    return answers


async def _stream(
    node: Node,
    generation: Generation,
    reply: Reply,
    body: ChatRequest | CompletionRequest,
    echoes: Sequence[str],
) -> AsyncGenerator[str, None]:
    """The lines of a stream, as they come or on the node's schedule."""
    padding = Padding(secrets.token_urlsafe, alternatives=body.alternatives)
    chunks = Chunks(
        generation,
        reply,
        openings=[
            reply.opening(index, echo) for index, echo in enumerate(echoes) if reply.chat or echo
        ],
        write=padding.line if body.padded else event_line,
    )
    if node.release == "immediate":
        async for chunk in chunks:
            yield chunk.line
        return
    pacer = Pacer(
        len(echoes), filler=chunks.filler, tick_s=node.release_tick_s, clock=time.monotonic
    )
    async for burst in pacer.bursts(chunks):
        yield burst
