"""A drafter whose drafts a test writes down beforehand."""

from collections.abc import Callable, Sequence

from draftkeep.serve.engine.row import Row


class Script:
    """A drafter that proposes, for each output index of a request, what it was given.

    `plans` names every request's tokens; behind their end it proposes nothing. `asked` keeps how
    many drafts each call wanted beside the index it wanted them for.
    """

    digest = b"script".ljust(32, b".")
    forward_s = 0.0

    def __init__(self, plans: dict[str, Sequence[int]]) -> None:
        self.plans = plans
        self.asked: list[tuple[int, int]] = []

    def room(self, row: Row) -> int:
        """As many as the engine likes."""
        return 1000

    def propose(
        self,
        rows: Sequence[Row],
        counts: Sequence[int],
        timed: Callable[[int, Callable[[], None]], None],
    ) -> None:
        """Copy the plan."""
        for row, count in zip(rows, counts, strict=True):
            at = row.output_len
            self.asked.append((at, count))
            row.drafts += self.plans[row.request.request_id][at : at + count]
            row.draft_laws += [None] * len(row.drafts)

    def forget(self, row: Row) -> None:
        """Nothing is kept."""

    def idle_pass(self, batch: int) -> None:
        """Nothing is computed."""
