"""Callers: the callers' functions, called in the engine's thread. Nothing they raise gets out."""

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from draftkeep.errors import DraftkeepError
from draftkeep.serve.engine.counters import Counters
from draftkeep.serve.engine.request import Emission, Finish, Finished, Request, StepReport

_Told = TypeVar("_Told")


class Callers:
    """Delivers to requests and to whoever counts; exceptions are counted and reported."""

    def __init__(
        self,
        counters: Counters,
        *,
        on_finish: Callable[[Finished], None],
        on_problem: Callable[[str, BaseException], None],
        on_step: Callable[[StepReport], None],
    ) -> None:
        self._counters = counters
        self._on_finish = on_finish
        self._on_problem = on_problem
        self._on_step = on_step

    def emit(self, request: Request, emission: Emission) -> bool:
        """Deliver tokens; False where the caller could not take them."""
        return self._call(request.on_tokens, emission)

    def cancelled(self, request: Request) -> None:
        """Tell a request that it was dropped."""
        self._counters.add(cancelled=1)
        self.emit(request, Emission(tokens=(), finish=Finish.CANCELLED))

    def fail(self, request: Request, error: DraftkeepError) -> None:
        """Tell a request that it failed."""
        self._counters.add(failed=1)
        self._call(request.on_error, error)

    def finish(self, finished: Finished) -> None:
        """Hand over what is known of a request that ended by itself."""
        self._counters.add(finished=1)
        self._call(self._on_finish, finished)

    def step(self, report: StepReport) -> None:
        """Report a step."""
        self._call(self._on_step, report)

    def problem(self, kind: str, error: BaseException) -> None:
        """Report what the engine survived."""
        with suppress(Exception):
            self._on_problem(kind, error)

    def _call(self, function: Callable[[_Told], None], told: _Told) -> bool:
        try:
            function(told)
        except Exception as error:
            self._counters.add(callback_failed=1)
            self.problem("a callback", error)
            return False
        return True
