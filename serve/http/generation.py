"""The choices of one request, seen from the event loop: the engine's thread pushes, the loop
awaits."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from draftkeep.errors import DraftkeepError, ModelError
from draftkeep.serve.delivery import Delivery
from draftkeep.serve.engine.engine import Engine
from draftkeep.serve.engine.request import Emission, Request
from draftkeep.serve.http.choice_text import ChoiceText, Update

CLIENT_GONE = "client_gone"
REQUEST_FAILED = "request_failed"
_Item = Emission | Update | DraftkeepError


class Choice:
    """One choice in the engine. `on_tokens` and `on_error` are its request's callbacks.

    Where it has stop strings its text is read in the engine's thread, so that the engine can end it
    at the token that completes one; otherwise in the event loop. `delivery` is told how it ended;
    None for a choice that is not captured. `tokens` counts what the engine has made of it.
    """

    def __init__(
        self,
        engine: Engine,
        request_id: str,
        text: ChoiceText,
        *,
        delivery: Delivery | None,
        push: Callable[[_Item], None],
    ) -> None:
        self.request_id = request_id
        self.submitted = False
        self.over = False
        self.tokens = 0
        self._engine = engine
        self._text = text
        self._delivery = delivery
        self._push = push

    def on_tokens(self, emission: Emission) -> None:
        """Called in the engine's thread."""
        if not self._text.has_stops:
            self.tokens += len(emission.tokens)
            self._push(emission)
            return
        try:
            update = self._decode(emission)
        except ModelError as error:
            # The engine drops a request whose callback raises, without another word.
            self.on_error(error)
            raise
        self.tokens += len(update.pieces)
        if update.stop_at is not None:
            self._engine.end(self.request_id, update.stop_at)
        self._push(update)

    def on_error(self, error: DraftkeepError) -> None:
        """Called in the engine's thread."""
        self.settle(REQUEST_FAILED)
        self._push(error)

    def read(self, item: Emission | Update) -> Update:
        """What the item adds; called in the event loop. ModelError where it cannot be decoded."""
        update = self._decode(item) if isinstance(item, Emission) else item
        self.over = update.finish is not None
        return update

    def settle(self, reason: str | None) -> None:
        """The client was handed all of it, or did not get it for that reason. The first counts."""
        if self._delivery is None:
            return
        if reason is None:
            self._delivery.deliver()
        else:
            self._delivery.abandon(reason)

    def _decode(self, emission: Emission) -> Update:
        try:
            return self._text.read(emission)
        except Exception as error:
            raise ModelError(
                f"decoding the answer failed with {type(error).__name__}; check the model's "
                "tokenizer files"
            ) from error


class Generation:
    """All choices of one request: `add` them, `start`, iterate `updates`, and `close` it whatever
    happened. Belongs to the event loop it was made in.

    `on_close(tokens)` hears once how many output tokens were generated, read or not.
    """

    def __init__(self, engine: Engine, *, on_close: Callable[[int], None]) -> None:
        self._engine = engine
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, _Item]] = asyncio.Queue()
        self._choices: list[Choice] = []
        self._failed = False
        self._closed = False

    @property
    def size(self) -> int:
        """How many choices were added."""
        return len(self._choices)

    def add(self, request_id: str, text: ChoiceText, delivery: Delivery | None) -> Choice:
        """One more choice, whose callbacks the request of the same place in `start` must have."""
        push = partial(self._push, len(self._choices))
        choice = Choice(self._engine, request_id, text, delivery=delivery, push=push)
        self._choices.append(choice)
        return choice

    def start(self, requests: Sequence[Request]) -> None:
        """Submit all; raises what the engine's `submit` raises."""
        for choice, request in zip(self._choices, requests, strict=True):
            self._engine.submit(request)
            choice.submitted = True

    async def updates(self) -> AsyncIterator[tuple[int, Update]]:
        """(choice, what is added to it) as it comes, until every choice has finished.

        Raises the error of the first choice that fails.
        """
        while not all(choice.over for choice in self._choices):
            index, item = await self._queue.get()
            choice = self._choices[index]
            try:
                if isinstance(item, DraftkeepError):
                    choice.over = True
                    raise item
                update = choice.read(item)
            except DraftkeepError:
                self._failed = True
                raise
            yield index, update

    def close(self, *, delivered: bool) -> None:
        """Free the slots of what still runs, and settle what becomes of every trace.

        `delivered` says that the client was handed the whole answer. The first call counts.
        """
        if self._closed:
            return
        self._closed = True
        failed = self._failed or not all(choice.submitted for choice in self._choices)
        reason = REQUEST_FAILED if failed else CLIENT_GONE
        for choice in self._choices:
            if choice.submitted and not choice.over:
                self._engine.cancel(choice.request_id)
            choice.settle(None if delivered and choice.over else reason)
        self._on_close(sum(choice.tokens for choice in self._choices))

    def _push(self, index: int, item: _Item) -> None:
        # The loop may have closed under a request that was still running at shutdown.
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, item))
