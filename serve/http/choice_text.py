"""The text of one choice, token by token, up to where it ends."""

from dataclasses import dataclass
from typing import Any

from draftkeep.serve.engine.request import Emission, Finish, TokenLogprob
from draftkeep.serve.http.detokenize import Detokenizer
from draftkeep.serve.http.stops import StopMatcher


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One generated token and the text that became certain with it, often not the token's own.

    `offset` is where the token's own text begins in the text of all tokens, in characters.
    """

    token: int
    text: str
    offset: int
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What an emission adds to a choice. `tail` is text that only the end made certain.

    `stop_at` is the number of tokens after which a stop string ended the choice, else None.
    """

    pieces: tuple[Piece, ...]
    tail: str = ""
    finish: Finish | None = None
    stop_at: int | None = None


class ChoiceText:
    """Reads one choice's emissions. Not thread-safe; one thread at a time.

    A stop string ends the choice at the token that completes it, once there are `min_tokens`. That
    token counts; neither the stop's text nor anything behind it is ever in an update. The token
    that ends the choice by itself (EOS, a stop id) has no text.
    """

    def __init__(self, tokenizer: Any, *, stops: tuple[str, ...], min_tokens: int) -> None:
        self.has_stops = bool(stops)
        self._detokenizer = Detokenizer(tokenizer)
        self._matcher = StopMatcher(stops)
        self._min_tokens = min_tokens
        self._tokens = 0
        self._chars = 0

    def read(self, emission: Emission) -> Update:
        """Take what a step emitted. Nothing may be read after an update that finishes."""
        pieces = []
        silent = len(emission.tokens) - 1 if emission.finish is Finish.STOP else None
        for at, token in enumerate(emission.tokens):
            logprob = None if emission.logprobs is None else emission.logprobs[at]
            offset = self._chars
            self._tokens += 1
            text, stopped = self._match("" if at == silent else self._detokenizer.push([token]))
            pieces.append(Piece(token=token, text=text, offset=offset, logprob=logprob))
            if stopped:
                return self._stop(pieces, "")
        if emission.finish is None:
            return Update(pieces=tuple(pieces))
        # A stop may hold a replacement character, which only the end makes certain.
        tail, stopped = self._match(self._detokenizer.flush())
        if stopped:
            return self._stop(pieces, tail)
        return Update(
            pieces=tuple(pieces), tail=tail + self._matcher.flush(), finish=emission.finish
        )

    def _match(self, text: str) -> tuple[str, bool]:
        self._chars += len(text)
        return self._matcher.push(text, armed=self._tokens >= self._min_tokens)

    def _stop(self, pieces: list[Piece], tail: str) -> Update:
        return Update(pieces=tuple(pieces), tail=tail, finish=Finish.STOP, stop_at=self._tokens)
