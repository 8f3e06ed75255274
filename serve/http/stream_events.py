"""The events of one stream, in order: openings, one for every token, ends, usage, [DONE]."""

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from draftkeep.errors import DraftkeepError
from draftkeep.serve.http.choice_text import Update
from draftkeep.serve.http.generation import Generation
from draftkeep.serve.http.http_errors import error_body
from draftkeep.serve.http.obfuscation import event_line
from draftkeep.serve.http.responses import Reply

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One line of a stream. `choice` is None where it belongs to the whole stream; `last` marks the
    final event of a choice."""

    line: str
    choice: int | None = None
    last: bool = False


class StreamEvents:
    """Iterates the events of `generation`. `write` makes a line of an event's JSON, `ready` tells
    whether the node takes requests.

    An event per token, never per step: one per step would tell what was accepted. An error after
    the first event is an event of its own. The stream's owner closes `generation`.
    """

    def __init__(
        self,
        generation: Generation,
        reply: Reply,
        *,
        openings: Sequence[dict[str, Any]],
        write: Callable[[dict[str, Any]], str],
        ready: Callable[[], bool],
    ) -> None:
        self._generation = generation
        self._reply = reply
        self._openings = openings
        self._write = write
        self._ready = ready

    async def __aiter__(self) -> AsyncIterator[Event]:
        for opening in self._openings:
            yield Event(line=self._write(opening), choice=opening["choices"][0]["index"])
        tokens = 0
        try:
            async for index, update in self._generation.updates():
                tokens += len(update.pieces)
                for event in self._of(index, update):
                    yield event
            if self._reply.with_usage:
                yield Event(line=self._write(self._reply.usage(tokens)))
        except DraftkeepError as error:
            yield Event(line=event_line(error_body(error, ready=self._ready())[1]))
        yield Event(line=DONE)

    def filler(self, index: int) -> str:
        """The line of an event that adds nothing to a choice."""
        return self._write(self._reply.filler(index))

    def _of(self, index: int, update: Update) -> list[Event]:
        events = [
            Event(line=self._write(self._reply.token(index, piece)), choice=index)
            for piece in update.pieces
        ]
        if update.finish is not None:
            end = self._reply.end(index, update.tail, update.finish)
            events.append(Event(line=self._write(end), choice=index, last=True))
        return events
