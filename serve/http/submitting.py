"""From a checked request to its choices in the engine, within the tenant's limits."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from draftkeep.ingest.trace import Provenance
from draftkeep.policies.tenant import UNKNOWN_DOMAIN, TenantPolicy
from draftkeep.serve.delivery import Delivery
from draftkeep.serve.engine.request import Request as EngineRequest
from draftkeep.serve.http.choice_text import ChoiceText
from draftkeep.serve.http.generation import Choice, Generation
from draftkeep.serve.http.openai_types import ChatRequest, CompletionRequest
from draftkeep.serve.http.prompting import sampling_of, seed_of
from draftkeep.serve.http.responses import Reply
from draftkeep.serve.node import Node

_coin = random.SystemRandom()


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt's ids, the most tokens an answer to it may have, and what answers repeat of it."""

    ids: tuple[int, ...]
    cap: int
    echo: str = ""


def within_limit(
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


def submit(
    node: Node,
    tenant: TenantPolicy,
    body: ChatRequest | CompletionRequest,
    reply: Reply,
    wanted: Sequence[tuple[Prompt, int]],
) -> Generation:
    """Every choice in the engine, or none and an error.

    Raises what the tenant's limits and the engine's `submit` raise.
    """
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
            choice, delivery = _choice(generation, node, tenant, body, reply)
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
                    capture=delivery is not None,
                    tag=delivery,
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
) -> tuple[Choice, Delivery | None]:
    """One more choice of the generation, which settles its delivery from here on."""
    request_id = f"{reply.response_id.hex()}-{generation.size}"
    text = ChoiceText(node.target.tokenizer, stops=body.stops, min_tokens=body.min_tokens or 0)
    # Last: nothing may fail between the admission and the generation that settles it.
    delivery = _admit(node, tenant, body, reply)
    return generation.add(request_id, text, delivery), delivery


def _admit(
    node: Node, tenant: TenantPolicy, body: ChatRequest | CompletionRequest, reply: Reply
) -> Delivery | None:
    """What becomes of the choice's trace; None where there will be none, which is counted."""
    decision = tenant.capture_decision(
        store=body.store, coin=_coin.random(), sampling_rate=node.sampling_rate
    )
    if not decision.allowed:
        node.capture.decline(decision.reason.value)
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
