"""The chunks of one stream, in order: openings, one for every token, ends, usage, [DONE]."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from draftkeep.errors import DraftkeepError
from draftkeep.serve.http.choice_text import Update
from draftkeep.serve.http.generation import Generation
from draftkeep.serve.http.http_errors import error_body
from draftkeep.serve.http.responses import Reply
from draftkeep.serve.http.sse_response import DONE, event_line


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One event of a stream as it is sent: the line around a chunk's JSON, which `Reply` makes.

    `choice` is None where it belongs to the whole stream; `last` marks the final one of a choice.
    """

    line: str
    choice: int | None = None
    last: bool = False


class Chunks:
    """Iterates the chunks of `generation`. `write` makes a line of a chunk's JSON.

    A chunk per token, never per step: one per step would tell what was accepted. An error after
    the first chunk is a chunk of its own. The stream's owner closes `generation`.
    """

    def __init__(
        self,
        generation: Generation,
        reply: Reply,
        *,
        openings: Sequence[dict[str, Any]],
        write: Callable[[dict[str, Any]], str],
    ) -> None:
        self._generation = generation
        self._reply = reply
        self._openings = openings
        self._write = write

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        for opening in self._openings:
            yield Chunk(line=self._write(opening), choice=opening["choices"][0]["index"])
        tokens = 0
        try:
            async for index, update in self._generation.updates():
                tokens += len(update.pieces)
                for chunk in self._of(index, update):
                    yield chunk
            if self._reply.with_usage:
                yield Chunk(line=self._write(self._reply.usage(tokens)))
        except DraftkeepError as error:
            yield Chunk(line=event_line(error_body(error)[1]))
        yield Chunk(line=DONE)

    def filler(self, index: int) -> str:
        """The line of a chunk that adds nothing to a choice."""
        return self._write(self._reply.filler(index))

    def _of(self, index: int, update: Update) -> list[Chunk]:
        chunks = [
            Chunk(line=self._write(self._reply.token(index, piece)), choice=index)
            for piece in update.pieces
        ]
        if update.finish is not None:
            end = self._reply.end(index, update.tail, update.finish)
            chunks.append(Chunk(line=self._write(end), choice=index, last=True))
        return chunks
