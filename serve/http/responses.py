"""The JSON of both routes, whole and in chunks. One shape, two dialects."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftkeep.serve.engine.request import Finish
from draftkeep.serve.http.choice_text import Piece
from draftkeep.serve.http.logprobs import TokenBytes, chat_logprobs, completion_logprobs

FINISH_REASONS = {Finish.STOP: "stop", Finish.LENGTH: "length"}


@dataclass(slots=True, kw_only=True)
class Answer:
    """One whole choice, as it was collected."""

    text: str = ""
    pieces: list[Piece] = field(default_factory=list)
    finish: Finish = Finish.LENGTH


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What every answer and chunk of one request repeats. `created_s` is Unix time.

    `token_bytes` spells tokens where log-probabilities were asked for, else None. `with_usage`
    streams carry `usage: null` until their last event.
    """

    chat: bool
    response_id: bytes
    created_s: int
    model: str
    fingerprint: str
    prompt_tokens: int
    token_bytes: TokenBytes | None = None
    with_usage: bool = False

    def whole(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        kind = "chat.completion" if self.chat else "text_completion"
        choices = [self._whole_choice(index, answer) for index, answer in enumerate(answers)]
        usage = self._usage(sum(len(answer.pieces) for answer in answers))
        return {**self._head(kind), "choices": choices, "usage": usage}

    def opening(self, index: int, echo: str = "") -> dict[str, Any]:
        """The first event of a choice: a chat's role, or the prompt a completion repeats."""
        return self._chunk(
            index, {"role": "assistant", "content": ""} if self.chat else {"text": echo}
        )

    def token(self, index: int, piece: Piece) -> dict[str, Any]:
        """The event of one token, whether or not it made any text certain."""
        return self._chunk(index, self._said(piece.text), pieces=[piece])

    def filler(self, index: int) -> dict[str, Any]:
        """An event that adds nothing."""
        return self._chunk(index, self._said(""))

    def end(self, index: int, tail: str, finish: Finish) -> dict[str, Any]:
        """The last event of a choice."""
        return self._chunk(index, self._said(tail), finish=finish)

    def usage(self, tokens: int) -> dict[str, Any]:
        """The last event of a stream that asked for usage."""
        return {**self._head(self._chunk_kind), "choices": [], "usage": self._usage(tokens)}

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.chat else "text_completion"

    def _whole_choice(self, index: int, answer: Answer) -> dict[str, Any]:
        said: dict[str, Any] = {"text": answer.text}
        if self.chat:
            message = {"role": "assistant", "content": answer.text, "refusal": None}
            said = {"message": message}
        return self._choice(index, said, answer.pieces, answer.finish)

    def _chunk(
        self,
        index: int,
        said: dict[str, str],
        *,
        pieces: Sequence[Piece] = (),
        finish: Finish | None = None,
    ) -> dict[str, Any]:
        body: dict[str, Any] = {"delta": said} if self.chat else said
        choice = self._choice(index, body, pieces, finish)
        event = {**self._head(self._chunk_kind), "choices": [choice]}
        return {**event, "usage": None} if self.with_usage else event

    def _choice(
        self, index: int, said: dict[str, Any], pieces: Sequence[Piece], finish: Finish | None
    ) -> dict[str, Any]:
        reason = None if finish is None else FINISH_REASONS[finish]
        return {
            "index": index,
            **said,
            "logprobs": self._logprobs(pieces),
            "finish_reason": reason,
        }

    def _said(self, text: str) -> dict[str, str]:
        if not self.chat:
            return {"text": text}
        return {"content": text} if text else {}

    def _logprobs(self, pieces: Sequence[Piece]) -> dict[str, Any] | None:
        if self.token_bytes is None or not pieces:
            return None
        form = chat_logprobs if self.chat else completion_logprobs
        return form(pieces, self.token_bytes)

    def _usage(self, tokens: int) -> dict[str, int]:
        """Token counts; the final EOS counts, as it was generated."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self.prompt_tokens + tokens,
        }

    def _head(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.response_id.hex()}",
            "object": kind,
            "created": self.created_s,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }
