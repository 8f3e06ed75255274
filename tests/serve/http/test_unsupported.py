"""Fields of other servers: refused by name where they ask for something, accepted where not."""

from typing import Any

import pytest

from draftkeep.errors import InputError
from draftkeep.serve.http.openai_types import ChatRequest, CompletionRequest

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
COMPLETION = {"model": "tiny", "prompt": "x"}

# A value that asks for something, and those that ask for nothing.
FIELDS: dict[str, tuple[Any, list[Any]]] = {
    "grammar": ('root ::= "a"', [None, ""]),
    "json_schema": ({}, [None]),
    "response_schema": ({"type": "object"}, [None]),
    "structural_tag": ({}, [None]),
    "regex": ("a+", [None, ""]),
    "ebnf": ("a", [None, ""]),
    "guided_decoding": ({"regex": "a"}, [None]),
    "guided_decoding_backend": ("outlines", [None]),
    "guided_whitespace_pattern": (" ", [None]),
    "guided_json": ({}, [None]),
    "guided_choice": (["a"], [None, []]),
    "logits_processors": (["module.name"], [None, []]),
    "documents": ([{"text": "a"}], [None, []]),
    "samplers": (["top_k"], [None]),
    "mirostat": (2, [None, 0]),
    "mirostat_tau": (4.0, [None, 5.0, 5]),
    "mirostat_eta": (0.2, [None, 0.1]),
    "dry_multiplier": (0.8, [None, 0, 0.0]),
    "dry_base": (2.0, [None, 1.75]),
    "dry_allowed_length": (3, [None, 2]),
    "dry_penalty_last_n": (64, [None, -1, 0]),
    "dry_sequence_breakers": (["a"], [None, []]),
    "xtc_probability": (0.5, [None, 0.0, 0]),
    "xtc_threshold": (0.2, [None, 0.1]),
    "dynatemp_range": (0.5, [None, 0, 0.0]),
    "dynatemp_exponent": (2.0, [None, 1]),
    "top_n_sigma": (1.0, [None, -1]),
    "repeat_penalty": (1.1, [None, 1, 1.0]),
}


def bodies(field: str, value: Any) -> list[ChatRequest | CompletionRequest]:
    return [
        ChatRequest.model_validate({**CHAT, field: value}),
        CompletionRequest.model_validate({**COMPLETION, field: value}),
    ]


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_would_change_the_answer_is_refused(field: str) -> None:
    for body in bodies(field, FIELDS[field][0]):
        with pytest.raises(InputError, match=f"^{field} is not supported") as refused:
            body.refuse_unsupported()
        assert refused.value.param == field


@pytest.mark.parametrize("field", FIELDS)
def test_a_value_that_asks_for_nothing_is_accepted(field: str) -> None:
    for value in FIELDS[field][1]:
        for body in bodies(field, value):
            body.refuse_unsupported()


def test_special_tokens_are_added_where_no_template_writes_them() -> None:
    for value, refusing, accepting in ((True, 0, 1), (False, 1, 0)):
        both = bodies("add_special_tokens", value)
        both[accepting].refuse_unsupported()
        with pytest.raises(InputError, match="add_special_tokens"):
            both[refusing].refuse_unsupported()
