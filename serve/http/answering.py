"""Answering one checked request: its choices in the engine, their traces, and the response."""

import asyncio
import random
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from draftkeep.ingest.trace import Provenance
from draftkeep.policies.tenant import UNKNOWN_DOMAIN, TenantPolicy
from draftkeep.serve.capture import CaptureTag
from draftkeep.serve.engine.request import Request as EngineRequest
from draftkeep.serve.http.choice_text import ChoiceText
from draftkeep.serve.http.chunks import Chunks
from draftkeep.serve.http.generation import Choice, Generation
from draftkeep.serve.http.logprobs import TokenBytes
from draftkeep.serve.http.obfuscation import Padding, event_line
from draftkeep.serve.http.openai_types import ChatRequest, CompletionRequest
from draftkeep.serve.http.pacing import Pacer
from draftkeep.serve.http.prompting import sampling_of, seed_of
from draftkeep.serve.http.responses import Answer, Reply
from draftkeep.serve.http.sse_response import SseResponse
from draftkeep.serve.node import Node

_coin = random.SystemRandom()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt's ids, the most tokens an answer to it may have, and what answers repeat of it."""

    ids: tuple[int, ...]
    cap: int
    echo: str = ""


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
    prompts = _within_limit(node, tenant, body, prompts)
    # Choice i of a prompt has the noise of choice i, whatever other prompts come with it.
    wanted = [(prompt, choice) for prompt in prompts for choice in range(body.choices)]
    generation = _start(node, tenant, body, reply, wanted)
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


def _within_limit(
    node: Node,
    tenant: TenantPolicy,
    body: ChatRequest | CompletionRequest,
    prompts: Sequence[Prompt],
) -> Sequence[Prompt]:
    """The prompts, where the client set no bound with answers that the tenant's limit allows.

    Without it an answer could take the whole context, which may be more than a minute's tokens.
    """
    most = node.limits.most_tokens(tenant.name)
    if body.token_cap is not None or most is None:
        return prompts
    left = most - sum(len(prompt.ids) for prompt in prompts)
    # A prompt that leaves nothing is refused by the limit itself.
    share = max(1, left // (len(prompts) * body.choices))
    return [replace(prompt, cap=min(prompt.cap, share)) for prompt in prompts]


def _start(
    node: Node,
    tenant: TenantPolicy,
    body: ChatRequest | CompletionRequest,
    reply: Reply,
    wanted: Sequence[tuple[Prompt, int]],
) -> Generation:
    """Every choice in the engine, or none and an error."""
    sampling, seed = sampling_of(node.target, body), seed_of(body)
    ticket = node.limits.enter(
        tenant.name,
        choices=len(wanted),
        tokens=reply.prompt_tokens + sum(prompt.cap for prompt, _ in wanted),
    )
    generation = Generation(
        node.engine, on_close=lambda tokens: ticket.close(reply.prompt_tokens + tokens)
    )
    try:
        requests = []
        for prompt, number in wanted:
            choice, tag = _choice(generation, node, tenant, body, reply)
            requests.append(
                EngineRequest(
                    request_id=choice.request_id,
                    prompt_ids=prompt.ids,
                    sampling=sampling,
                    seed=seed,
                    choice=number,
                    max_tokens=prompt.cap,
                    on_tokens=choice.on_tokens,
                    on_error=choice.on_error,
                    top_logprobs=body.alternatives,
                    group=tenant.domain_for(body.domain) or UNKNOWN_DOMAIN,
                    capture=tag is not None,
                    tag=tag,
                )
            )
        generation.start(requests)
    except BaseException:
        # Nothing was answered, so nothing is charged; the first close counts.
        ticket.close(0)
        generation.close(delivered=False)
        raise
    return generation


def _choice(
    generation: Generation,
    node: Node,
    tenant: TenantPolicy,
    body: ChatRequest | CompletionRequest,
    reply: Reply,
) -> tuple[Choice, CaptureTag | None]:
    """One more choice of the generation, which settles its tag from here on."""
    request_id = f"{reply.response_id.hex()}-{generation.size}"
    text = ChoiceText(node.target.tokenizer, stops=body.stops, min_tokens=body.min_tokens or 0)
    # The tag last: nothing may fail between its admission and the generation that settles it.
    tag = _capture_tag(node, tenant, body, reply)
    return generation.add(request_id, text, None if tag is None else tag.delivery), tag


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
