"""Fields that change an answer, here or in other servers, and are not supported: refused by name.

A field that is not listed is without influence on the answer, and ignored.
"""

from collections.abc import Mapping
from typing import Any

# Beside null, the values that leave the answer alone.
IN_BODY: dict[str, tuple[Any, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "response_schema": (),
    "json_schema": (),
    "grammar": ("",),
    "regex": ("",),
    "ebnf": ("",),
    "structural_tag": (),
    "guided_decoding": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "logits_processors": ([],),
    "documents": ([],),
    "samplers": (),
    "mirostat": (0, 0.0),
    # Without what they belong to, these change nothing at their own defaults.
    "mirostat_tau": (5, 5.0),
    "mirostat_eta": (0.1,),
    "dry_multiplier": (0, 0.0),
    "dry_base": (1.75,),
    "dry_allowed_length": (2,),
    "dry_penalty_last_n": (-1, 0),
    "dry_sequence_breakers": (["\n", ":", '"', "*"], []),
    "xtc_probability": (0, 0.0),
    "xtc_threshold": (0.1,),
    "dynatemp_range": (0, 0.0),
    "dynatemp_exponent": (1, 1.0),
    "top_n_sigma": (-1, -1.0),
    "repeat_penalty": (1, 1.0),
    "typical_p": (1, 1.0),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "prompt_logprobs": (),
}
IN_CHAT: dict[str, tuple[Any, ...]] = {
    "echo": (False,),
    "best_of": (1,),
    # The template writes its own.
    "add_special_tokens": (False,),
}
IN_COMPLETION: dict[str, tuple[Any, ...]] = {"top_logprobs": (0,), "add_special_tokens": (True,)}
IN_MESSAGE: dict[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "function_call": (),
    "tool_call_id": (),
    "audio": (),
}


def first_unsupported(
    extra: Mapping[str, Any] | None, neutral: Mapping[str, tuple[Any, ...]]
) -> str | None:
    """The first field of `neutral` that was given another value than null or a neutral one.

    0 and false are different values here: a number may ask for something.
    """
    for name, value in (extra or {}).items():
        allowed = neutral.get(name)
        if allowed is None or value is None:
            continue
        if not any(type(value) is type(same) and value == same for same in allowed):
            return name
    return None
