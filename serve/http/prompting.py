"""From a request's body to what the engine takes: prompt ids, sampling values, seed, bounds."""

import secrets
from collections.abc import Sequence
from typing import Any

from draftkeep.errors import InputError
from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.http.detokenize import whole_text
from draftkeep.serve.http.openai_types import ChatRequest, CompletionRequest
from draftkeep.store.models.target import TargetModel

SEED_BITS = 64


def chat_prompt(target: TargetModel, body: ChatRequest) -> tuple[int, ...]:
    """The messages under the model's own chat template, ready for the assistant's turn."""
    if target.tokenizer.chat_template is None:
        raise InputError("this model has no chat template; use /v1/completions", param="messages")
    messages = [
        {"role": "system" if m.role == "developer" else m.role, "content": m.text}
        for m in body.messages
    ]
    try:
        text = target.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except Exception:  # templates are programs of the model's maker and raise what they like
        raise InputError(
            "the model's chat template refuses this order of roles", param="messages"
        ) from None
    # The template writes its own special tokens.
    return _ids(target.tokenizer, text, special=False, param="messages")


def completion_prompts(
    target: TargetModel, body: CompletionRequest
) -> list[tuple[tuple[int, ...], str]]:
    """Every prompt's ids and text: as it was sent, or the given ids where all of them exist."""
    return [_completion_prompt(target, prompt) for prompt in body.prompt]


def sampling_of(target: TargetModel, body: ChatRequest | CompletionRequest) -> Sampling:
    """The sampling values, OpenAI's defaults where the request gives none."""
    bias, stop_ids = body.logit_bias or {}, body.stop_token_ids or []
    for param, ids in (("logit_bias", bias), ("stop_token_ids", stop_ids)):
        if any(not 0 <= token < target.vocab for token in ids):
            raise InputError(f"{param} names a token id outside 0..{target.vocab - 1}", param=param)
    return Sampling(
        temperature=_given(body.temperature, 1.0),
        top_p=_given(body.top_p, 1.0),
        top_k=max(0, body.top_k or 0),
        min_p=_given(body.min_p, 0.0),
        repetition_penalty=_given(body.repetition_penalty, 1.0),
        presence_penalty=_given(body.presence_penalty, 0.0),
        frequency_penalty=_given(body.frequency_penalty, 0.0),
        logit_bias=tuple(sorted(bias.items())),
        eos_ids=target.eos_ids,
        stop_ids=tuple(sorted(set(stop_ids))),
        ignore_eos=bool(body.ignore_eos),
        min_tokens=body.min_tokens or 0,
    )


def seed_of(body: ChatRequest | CompletionRequest) -> int:
    """The request's seed modulo 2^64, or 64 bits from the operating system."""
    if body.seed is None:
        return secrets.randbits(SEED_BITS)
    return body.seed % (1 << SEED_BITS)


def output_cap(
    prompt_ids: Sequence[int], wanted: int | None, *, max_context: int, param: str
) -> int:
    """How many tokens may be generated; InputError where the prompt leaves room for none."""
    room = max_context - len(prompt_ids)
    if room < 1:
        raise InputError(
            f"the prompt has {len(prompt_ids)} tokens and this service takes "
            f"{max_context - 1}; shorten it",
            param=param,
        )
    return min(room, wanted) if wanted is not None else room


def fewest_tokens(choices: int, wanted: int | None, *, max_context: int) -> int:
    """What one prompt and its answers are counted as at least, whatever the prompt is.

    A prompt that nearly fills the context leaves each answer one token, and so may a tenant's limit
    where the client set no bound.
    """
    return min(1 + choices * (wanted or 1), max_context - 1 + choices)


def _completion_prompt(target: TargetModel, prompt: str | list[int]) -> tuple[tuple[int, ...], str]:
    if isinstance(prompt, str):
        return _ids(target.tokenizer, prompt, special=True, param="prompt"), prompt
    if any(not 0 <= token < target.vocab for token in prompt):
        raise InputError(f"prompt holds a token id outside 0..{target.vocab - 1}", param="prompt")
    return tuple(prompt), whole_text(target.tokenizer, prompt)


def _given(value: float | None, default: float) -> float:
    return default if value is None else float(value)


def _ids(tokenizer: Any, text: str, *, special: bool, param: str) -> tuple[int, ...]:
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise InputError(f"{param} holds half of a surrogate pair, expected Unicode", param=param)
    return tuple(tokenizer(text, add_special_tokens=special)["input_ids"])
