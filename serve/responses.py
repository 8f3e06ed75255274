"""The JSON of both routes, whole and in chunks. One shape, two dialects."""

from dataclasses import dataclass
from typing import Any

from draftkeep.serve.request import Finish

FINISH_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What every answer and chunk of one request repeats. `created_s` is Unix time."""

    chat: bool
    response_id: bytes
    created_s: int
    model: str
    fingerprint: str
    prompt_tokens: int

    def whole(self, text: str, finish: Finish, tokens: int) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": _reason(finish)}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": text, "refusal": None}
        else:
            choice["text"] = text
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self._head(kind), "choices": [choice], "usage": self.usage(tokens)}

    def chunk(
        self, text: str, finish: Finish | None, *, first: bool, with_usage: bool
    ) -> dict[str, Any]:
        """One event of a stream. `with_usage` streams carry `usage: null` until their last."""
        reason = None if finish is None else _reason(finish)
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": reason}
        if self.chat:
            delta: dict[str, str] = {"role": "assistant", "content": text} if first else {}
            if text and not first:
                delta["content"] = text
            choice["delta"] = delta
        else:
            choice["text"] = text
        event = {**self._head(self._chunk_kind), "choices": [choice]}
        return {**event, "usage": None} if with_usage else event

    def usage_chunk(self, tokens: int) -> dict[str, Any]:
        """The last event of a stream that asked for usage."""
        return {**self._head(self._chunk_kind), "choices": [], "usage": self.usage(tokens)}

    def usage(self, tokens: int) -> dict[str, int]:
        """Token counts; the final EOS counts, as it was generated."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
        }

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _head(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.response_id.hex()}",
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


def _reason(finish: Finish) -> str:
    return FINISH_REASONS[finish]
