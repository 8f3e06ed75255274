"""What the OpenAI-compatible routes accept.

A field that would change the output but is not supported is refused, never ignored. Fields
without influence on the output are accepted and dropped; none of them is logged.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    StringConstraints,
)

from draftkeep.errors import InputError
from draftkeep.serve.engine.request_check import MAX_TOP_LOGPROBS
from draftkeep.serve.http import unsupported

MAX_SUBJECT_CHARS = 128
MAX_CHOICES = 8
MAX_PROMPTS = 32
# Choices of all prompts together, each of them a request to the engine.
MAX_TOTAL_CHOICES = 32
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_STOP_TOKENS = 64

Penalty = Annotated[float, Field(ge=-2, le=2)]
Subject = Annotated[str, StringConstraints(min_length=1, max_length=MAX_SUBJECT_CHARS)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARS)]


def _as_list(value: Any) -> Any:
    """One string or one list of ids stands for a list of one."""
    one = isinstance(value, str) or (isinstance(value, list) and value and type(value[0]) is int)
    return [value] if one else value


# An empty string asks for nothing, as an empty list does.
Stops = Annotated[
    list[Stop],
    Field(max_length=MAX_STOPS),
    BeforeValidator(lambda v: [] if v == "" else _as_list(v)),
]
SentPrompt = Annotated[str, Field(min_length=1)] | Annotated[list[StrictInt], Field(min_length=1)]
SentPrompts = Annotated[
    list[SentPrompt], Field(min_length=1, max_length=MAX_PROMPTS), BeforeValidator(_as_list)
]
# Some clients send false for null; a number asks for something, even 0.
TopLogprobs = Annotated[
    Annotated[StrictInt, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None,
    BeforeValidator(lambda v: None if v is False else v),
]


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

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Sampled(BaseModel):
    """The fields both routes share. `user` is the older name of `safety_identifier`."""

    model_config = ConfigDict(extra="allow", strict=False)

    _neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = unsupported.IN_BODY

    model: str
    n: int | None = Field(default=None, ge=1, le=MAX_CHOICES)
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
    stop: Stops | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKENS)] | None = None
    min_tokens: int | None = Field(default=None, ge=0)
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None
    user: Subject | None = None
    safety_identifier: Subject | None = None

    @property
    def choices(self) -> int:
        """How many answers each prompt gets."""
        return self.n or 1

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end the output, none empty."""
        return tuple(self.stop or ())

    @property
    def subject(self) -> str | None:
        """Who stands behind the request, or None."""
        return self.safety_identifier or self.user

    @property
    def domain(self) -> str | None:
        """The label the request gives its own traffic, or None."""
        return (self.metadata or {}).get("domain")

    @property
    def with_usage(self) -> bool:
        """Whether a stream ends with its token counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def padded(self) -> bool:
        """Whether a stream's events are padded: unless the request says no."""
        options = self.stream_options
        return options is None or options.include_obfuscation is not False

    def refuse_unsupported(self) -> None:
        """Raise InputError for the first field that would need what is not there."""
        name = unsupported.first_unsupported(self.model_extra, self._neutral)
        if name is not None:
            raise InputError(f"{name} is not supported here; leave it out", param=name)
        if self.stream_options is not None and not self.stream:
            raise InputError("stream_options needs stream to be true", param="stream_options")


class ChatRequest(_Sampled):
    """Body of POST /v1/chat/completions."""

    _neutral = {**unsupported.IN_BODY, **unsupported.IN_CHAT}

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: StrictBool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)

    def refuse_unsupported(self) -> None:
        """As for every request, and for fields of a message."""
        super().refuse_unsupported()
        if self.top_logprobs and not self.logprobs:
            raise InputError("top_logprobs needs logprobs to be true", param="top_logprobs")
        for message in self.messages:
            name = unsupported.first_unsupported(message.model_extra, unsupported.IN_MESSAGE)
            if name is not None:
                raise InputError(
                    f"a message with {name} is not supported here; send text alone",
                    param="messages",
                )

    @property
    def token_cap(self) -> int | None:
        """The caller's bound on output tokens, or None."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """How many alternatives each token's log-probability comes with; None for none at all."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(_Sampled):
    """Body of POST /v1/completions. One prompt or a list of them, as text or as token ids."""

    _neutral = {**unsupported.IN_BODY, **unsupported.IN_COMPLETION}

    prompt: SentPrompts
    best_of: int | None = None
    echo: bool | None = None
    logprobs: TopLogprobs = None

    def refuse_unsupported(self) -> None:
        """As for every request, and for answers that would have to be ranked or read back."""
        super().refuse_unsupported()
        if self.best_of not in (None, 1, self.choices):
            raise InputError(
                f"best_of is {self.best_of}, expected 1 or n: answers are not ranked here",
                param="best_of",
            )
        if self.echo and self.alternatives is not None:
            raise InputError(
                "echo with logprobs is not supported here: a prompt's log-probabilities are not "
                "computed; leave one of them out",
                param="echo",
            )

    @property
    def token_cap(self) -> int:
        """The caller's bound on output tokens; OpenAI's default where it gave none."""
        return self.max_tokens or 16

    @property
    def alternatives(self) -> int | None:
        """How many alternatives each token's log-probability comes with; None for none at all."""
        return self.logprobs
