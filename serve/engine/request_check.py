"""What a request must be before the engine queues it."""

from draftkeep.errors import InputError
from draftkeep.serve.engine.request import Request

MAX_TOP_LOGPROBS = 20


def check_request(request: Request, *, vocab: int, max_context: int) -> None:
    """Raises InputError for a prompt that is empty, too long or of foreign ids, for max_tokens
    below 1, for top_logprobs outside 0 to 20 and for a bias of foreign ids."""
    prompt = request.prompt_ids
    if not prompt:
        raise InputError("the prompt is empty; send at least one token")
    if len(prompt) >= max_context:
        raise InputError(
            f"the prompt has {len(prompt)} tokens but the context holds {max_context} "
            "including the answer; shorten the prompt"
        )
    if min(prompt) < 0 or max(prompt) >= vocab:
        raise InputError(
            f"the prompt holds ids outside the model's {vocab}; use the model's tokenizer"
        )
    if request.max_tokens < 1:
        raise InputError(
            f"max_tokens is {request.max_tokens}, expected at least 1", param="max_tokens"
        )
    if request.top_logprobs is not None and not 0 <= request.top_logprobs <= MAX_TOP_LOGPROBS:
        raise InputError(
            f"top_logprobs is {request.top_logprobs}, expected 0 to {MAX_TOP_LOGPROBS}",
            param="top_logprobs",
        )
    if any(not 0 <= token < vocab for token, _ in request.sampling.logit_bias):
        raise InputError(f"logit_bias names ids outside the model's {vocab}", param="logit_bias")
