"""Drafting: what a drafter is to the engine, whoever proposes.

V: the target's vocabulary.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor
from transformers import PreTrainedModel

from draftkeep.serve.engine.row import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModel:
    """A drafter as the engine takes it: logit column i of `model` is target id vocab_ids[i].

    The model reads target ids. `tokens` is how many ids, from 0, the common tokenizer names; ids
    from there on are padding in either vocabulary and are never proposed. None: all of the
    target's name tokens. The model belongs to the engine once it was handed over.
    """

    model: PreTrainedModel
    vocab_ids: Tensor
    digest: bytes
    tokens: int | None = None


class Drafter(Protocol):
    """Proposes tokens for rows.

    Under the coupled rule what it proposes changes speed and never what a caller gets; under
    rejection the law of an output stays the target's, and which tokens it draws depends on them.

    Used by the engine's thread alone; an exception in a method costs the drafter, not a request.
    """

    @property
    def digest(self) -> bytes:
        """What traces and counters name it by, 32 bytes."""
        ...

    @property
    def forward_s(self) -> float:
        """Seconds spent in forward passes since it was made; a proposal's rest is bookkeeping."""
        ...

    def room(self, row: Row) -> int:
        """The most drafts that can be proposed for this row as it stands."""
        ...

    def propose(
        self,
        rows: Sequence[Row],
        counts: Sequence[int],
        timed: Callable[[int, Callable[[], None]], None],
    ) -> None:
        """Append up to `counts[i]` tokens to the empty `drafts` of rows[i], 0 for none.

        Under the rejection rule `draft_laws` gets an entry for every draft: the log of the
        processed distribution over V it was drawn from, or None where it was certain. No count is
        above the row's `room`. A row gets fewer tokens, or none, where the drafter knows nothing
        to propose. `timed(batch, work)` runs the work for one more draft of `batch` rows.
        """
        ...

    def forget(self, row: Row) -> None:
        """Drop what is kept of this row: it changes its slot, or another drafter had its turn."""
        ...

    def idle_pass(self, batch: int) -> None:
        """The work of one draft for `batch` rows without a row, to measure what it costs."""
        ...
