"""Scheduler: who holds a slot, who gives it up, and whose prompt is read next."""

from draftkeep.serve.engine.counters import Counters
from draftkeep.serve.engine.inbox import Inbox, Waiting
from draftkeep.serve.engine.row import Row
from draftkeep.serve.passes.rectangle import Segment
from draftkeep.serve.passes.runner import PREFILL_CHUNK

# Prompt tokens read between two steps, so that a joining request delays the others by little.
PREFILL_PER_STEP = 2 * PREFILL_CHUNK


class Scheduler:
    """Gives slots to the requests of an inbox, in the order of its line. The engine's thread's own.

    Where slots run out, whoever has waited longer than `preempt_after_s` takes the slot of the row
    that has held its own longest, if that has lasted at least as long and brought the row at least
    one token; the row goes to the end of the line and later on with what it has. At most one slot
    changes hands so in a step. 0: nobody gives way.
    """

    def __init__(
        self,
        inbox: Inbox,
        counters: Counters,
        *,
        slots: int,
        vocab: int,
        context: int,
        preempt_after_s: float,
        k: int,
        processed: bool,
    ) -> None:
        self.rows: dict[int, Row] = {}
        self._inbox = inbox
        self._counters = counters
        self._slots = slots
        self._vocab = vocab
        self._context = context
        self._preempt_after_s = preempt_after_s
        self._k = k
        self._processed = processed

    def admit(self, now_s: float) -> Row | None:
        """Give free slots to the next in line; the row that had to give its own up, or None."""
        for slot in range(self._slots):
            if slot not in self.rows and not self._seat(slot, now_s):
                return None
        row = self._due(now_s)
        if row is not None:
            self._seat(row.slot, now_s)
            row.park()
            self._inbox.put_back(row, now_s)
            self._counters.add(preempted=1)
        return row

    def release(self, row: Row) -> None:
        """The row is over; its slot is free and its id may be used again."""
        self.rows.pop(row.slot, None)
        self._inbox.forget(row.request.request_id)

    def reading_turn(self) -> list[Segment]:
        """A bounded piece of the prompts that are not read yet, first come first served.

        The rows count it as read.
        """
        left, segments = PREFILL_PER_STEP, []
        joining = [row for row in self.rows.values() if row.backlog]
        for row in sorted(joining, key=lambda row: row.slot_since_s):
            count = min(row.backlog, PREFILL_CHUNK)
            if count > left:
                break
            left -= count
            start = row.target_len
            tokens = row.tokens[start : start + count]
            segments.append(Segment(slot=row.slot, tokens=tokens, start=start))
            row.target_len += count
        return segments

    def ready(self) -> list[Row]:
        """The rows that can be decoded, by slot."""
        return [row for _, row in sorted(self.rows.items()) if row.backlog == 0]

    def _due(self, now_s: float) -> Row | None:
        """The row whose turn it is to give way."""
        since_s, oldest_s = now_s - self._preempt_after_s, self._inbox.oldest_s()
        if not self._preempt_after_s or oldest_s is None or oldest_s >= since_s:
            return None
        due = [row for row in self.rows.values() if row.may_give_way(since_s)]
        return min(due, key=lambda row: row.slot_since_s, default=None)

    def _seat(self, slot: int, now_s: float) -> bool:
        """Put the first in line into the slot; False where nobody waits."""
        waiting = self._inbox.take(now_s)
        if waiting is None:
            return False
        row = waiting.row
        if row is None:
            row = self._start(waiting, now_s)
            self._counters.add(prompt_tokens=len(row.request.prompt_ids))
        row.enter(slot, now_s)
        self.rows[slot] = row
        return True

    def _start(self, waiting: Waiting, now_s: float) -> Row:
        request = waiting.request
        return Row(
            request,
            budget=min(request.max_tokens, self._context - len(request.prompt_ids)),
            vocab=self._vocab,
            k=self._k if request.capture else 0,
            submitted_s=waiting.queued_s,
            started_s=now_s,
            processed=self._processed,
        )
