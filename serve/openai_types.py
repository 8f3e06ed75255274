"""What the OpenAI-compatible routes accept, and what they refuse by name.

A field that would change the output but is not supported is refused, never ignored. Fields
without influence on the output are accepted and dropped; none of them is logged.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from draftkeep.errors import InputError

MAX_SUBJECT_CHARS = 128
# Fields that change the output, here or in other servers, with the values that leave it alone
# beside null.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stop": ("", []),
    "stop_token_ids": ([],),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "prompt_logprobs": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": ([],),
    "guided_grammar": (),
    "echo": (False,),
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
    "typical_p": (1, 1.0),
    "length_penalty": (1, 1.0),
    "use_beam_search": (False,),
    "truncate_prompt_tokens": (),
    "skip_special_tokens": (True,),
}
_NEUTRAL_IN_MESSAGES: dict[str, tuple[Any, ...]] = {
    "tool_calls": ([],),
    "function_call": (),
    "tool_call_id": (),
    "audio": (),
}

Penalty = Annotated[float, Field(ge=-2, le=2)]
Subject = Annotated[str, StringConstraints(min_length=1, max_length=MAX_SUBJECT_CHARS)]


class TextPart(BaseModel):
    """One text part of a message."""

    model_config = ConfigDict(extra="ignore")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    """One chat message. Content is a string or a list of text parts."""

    model_config = ConfigDict(extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]

    @property
    def text(self) -> str:
        """The content as one string."""
        if isinstance(self.content, str):
            return self.content
        return "".join(part.text for part in self.content)


class StreamOptions(BaseModel):
    """How a stream is shaped."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class _Sampled(BaseModel):
    """The fields both routes share. `user` is the older name of `safety_identifier`."""

    model_config = ConfigDict(extra="allow", strict=False)

    model: str
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float | None = Field(default=None, ge=0, le=1)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: float | None = Field(default=None, gt=0, le=10)
    logit_bias: dict[int, Annotated[float, Field(ge=-100, le=100)]] | None = None
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    min_tokens: int | None = Field(default=None, ge=0)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    user: Subject | None = None
    safety_identifier: Subject | None = None

    @property
    def subject(self) -> str | None:
        """Who stands behind the request, or None."""
        return self.safety_identifier or self.user

    @property
    def domain(self) -> str | None:
        """The label the request gives its own traffic, or None."""
        return (self.metadata or {}).get("domain")

    def refuse_unsupported(self) -> None:
        """Raise InputError for the first field that would need what is not there."""
        name = _first_unsupported(self.model_extra, _NEUTRAL)
        if name is not None:
            raise InputError(f"{name} is not supported here; leave it out", param=name)
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options needs stream to be true", param="stream_options")


class ChatRequest(_Sampled):
    """Body of POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)

    def refuse_unsupported(self) -> None:
        """As for every request, and for fields of a message."""
        super().refuse_unsupported()
        for message in self.messages:
            name = _first_unsupported(message.model_extra, _NEUTRAL_IN_MESSAGES)
            if name is not None:
                raise InputError(
                    f"a message with {name} is not supported here; send text alone",
                    param="messages",
                )

    @property
    def token_cap(self) -> int | None:
        """The caller's bound on output tokens, or None."""
        return self.max_completion_tokens or self.max_tokens


class CompletionRequest(_Sampled):
    """Body of POST /v1/completions. The prompt is one string or one list of token ids."""

    prompt: Annotated[str, Field(min_length=1)] | Annotated[list[int], Field(min_length=1)]

    @property
    def token_cap(self) -> int:
        """The caller's bound on output tokens; OpenAI's default where it gave none."""
        return self.max_tokens or 16


def _first_unsupported(
    extra: dict[str, Any] | None, neutral: Mapping[str, tuple[Any, ...]]
) -> str | None:
    """The first field of `neutral` that was given another value than null or a neutral one.

    0 and false are different values here: `logprobs: 0` asks for something.
    """
    for name, value in (extra or {}).items():
        allowed = neutral.get(name)
        if allowed is None or value is None:
            continue
        if not any(type(value) is type(same) and value == same for same in allowed):
            return name
    return None
