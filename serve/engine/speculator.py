"""Speculator: the drafter of the moment, and how many tokens it proposes for each row."""

from collections.abc import Callable, Collection, Sequence

from draftkeep.serve.engine.counters import Counters
from draftkeep.serve.engine.drafting import Drafter
from draftkeep.serve.engine.lookahead import LookaheadController, Speculation, SpeculationState
from draftkeep.serve.engine.row import Row
from draftkeep.serve.engine.weighing import Wish

_IDLE_PASSES = 3


class Speculator:
    """Drafts with one drafter at a time, for the engine's thread.

    `lost` is the digest of a drafter given up with none handed over since, else empty. `floor`
    drafts where no other drafter does: from the start, after one was taken away and after
    one was lost to a failing pass. None: nothing does. `on_problem(kind, error)` hears of a loss.
    """

    def __init__(
        self,
        speculation: Speculation,
        counters: Counters,
        *,
        slots: int,
        floor: Drafter | None,
        clock: Callable[[], float],
        on_problem: Callable[[str, BaseException], None],
    ) -> None:
        self.drafter: Drafter | None = None
        self.lost = b""
        self._lookahead = LookaheadController(speculation)
        self._batches = sorted({1, slots})
        self._floor = floor
        self._clock = clock
        self._counters = counters
        self._on_problem = on_problem

    @property
    def digest(self) -> bytes:
        """The drafter's digest, empty without one."""
        return b"" if self.drafter is None else self.drafter.digest

    def state(self) -> SpeculationState:
        """The last plan and its reason. Any thread."""
        return self._lookahead.state()

    def speculate(self, speculation: Speculation) -> None:
        """Plan otherwise from the next step on. Any thread."""
        self._lookahead.speculation = speculation

    def forget_loss(self) -> None:
        """Another drafter is on its way, so `lost` names none. Any thread."""
        self.lost = b""

    def observe(self, group: str, tested: int, accepted: int) -> None:
        """Take how one row's drafts fared."""
        self._lookahead.observe(group, tested, accepted)

    def observe_pass(self, batch: int, width: int, seconds: float) -> None:
        """Take what one pass of the target cost."""
        self._lookahead.target_cost.observe(batch, width, seconds)

    def measure_target(self, idle_pass: Callable[[int, int], None]) -> None:
        """Time idle passes for the first plan; live passes correct the figures."""
        speculation = self._lookahead.speculation
        if speculation.mode == "auto":
            for width in (1, 2, 1 + speculation.lookahead):
                self._measure(
                    lambda batch, width=width: idle_pass(batch, width),  # type: ignore[misc]
                    lambda batch, s, width=width: self.observe_pass(batch, width, s),  # type: ignore[misc]
                )

    def install(self, drafter: Drafter | None, rows: Collection[Row]) -> None:
        """Draft with this one, or with the floor, from now on."""
        if drafter is not None:
            self.forget_loss()
        drafter = drafter or self._floor
        self.drafter = drafter
        self._lookahead.new_drafter()
        if drafter is None:
            return
        try:
            for row in rows:
                drafter.forget(row)
            if self._lookahead.speculation.mode == "auto":
                self._measure(
                    drafter.idle_pass,
                    lambda batch, s: self._lookahead.draft_cost.observe(batch, 1, s),
                )
        except Exception as error:
            self._lose(drafter, rows, error)

    def forget(self, row: Row) -> None:
        """The row leaves its slot."""
        if self.drafter is not None:
            try:
                self.drafter.forget(row)
            except Exception as error:
                self._lose(self.drafter, (), error)

    def draft(self, rows: Sequence[Row]) -> float:
        """Fill the drafts of every row, as many as the plan says; the seconds of forward passes."""
        for row in rows:
            row.clear_drafts()
        drafter = self.drafter
        before_s = 0.0 if drafter is None else drafter.forward_s
        try:
            wishes = [Wish(group=row.request.group, cap=self._cap(row)) for row in rows]
            counts = self._lookahead.plan(wishes, running=len(rows), drafter=drafter is not None)
            if drafter is not None and any(counts):
                drafter.propose(rows, counts, self._timed)
        except Exception as error:
            if drafter is None:
                raise
            # The target does not depend on the drafter, so a broken one costs speed alone.
            for row in rows:
                row.clear_drafts()
            self._lose(drafter, rows, error)
        return 0.0 if drafter is None else drafter.forward_s - before_s

    def _cap(self, row: Row) -> int:
        """The most drafts this row could use."""
        return min(row.remaining - 1, self.drafter.room(row)) if self.drafter else 0

    def _timed(self, batch: int, work: Callable[[], None]) -> None:
        started = self._clock()
        work()
        self._lookahead.draft_cost.observe(batch, 1, self._clock() - started)

    def _measure(
        self, idle_pass: Callable[[int], None], observe: Callable[[int, float], None]
    ) -> None:
        for batch in self._batches:
            times = []
            for _ in range(_IDLE_PASSES):
                started = self._clock()
                idle_pass(batch)
                times.append(self._clock() - started)
            observe(batch, min(times))

    def _lose(self, drafter: Drafter, rows: Collection[Row], error: Exception) -> None:
        self._counters.add(drafter_failed=1)
        self._on_problem(f"drafter {drafter.digest.hex()[:12]}", error)
        if drafter is self._floor:
            self._floor = None
        else:
            self.lost = drafter.digest
        self.install(None, rows)
