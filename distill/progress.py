"""What a running job tells its caller."""

from collections.abc import Callable
from dataclasses import dataclass

from draftkeep.distill.trainer import TrainProgress


@dataclass(frozen=True, slots=True, kw_only=True)
class JobProgress:
    """Where a job is. `stage`: select, baseline, train or evaluate; `fraction` of that stage.

    `train` is set in reports of the stage `train`.
    """

    stage: str
    fraction: float
    train: TrainProgress | None = None


class Poll:
    """A question that costs a little, asked at most once every `every_s`; a yes is final."""

    def __init__(
        self, ask: Callable[[], bool], *, timer: Callable[[], float], every_s: float = 1.0
    ) -> None:
        self._ask = ask
        self._timer = timer
        self._every_s = every_s
        self._answer = False
        self._asked_s: float | None = None

    def __call__(self) -> bool:
        """The latest answer."""
        now_s = self._timer()
        if not self._answer and (self._asked_s is None or now_s - self._asked_s >= self._every_s):
            self._answer, self._asked_s = self._ask(), now_s
        return self._answer
