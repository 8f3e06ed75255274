"""NgramDrafter: prompt lookup. What followed the last occurrence of a row's own ending, again.

It needs no weights and no training, so there is always one (Saxena, 2023).
"""

import hashlib
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

from draftkeep.kernels.outcome import is_end
from draftkeep.serve.engine.row import Row

NGRAM_DIGEST = hashlib.sha256(b"draftkeep/v1/ngram").digest()


class NgramDrafter:
    """Proposes what followed the longest repeated ending of a row's own prompt and output.

    The ending is of `max_n` down to `min_n` tokens, and its latest earlier occurrence counts.
    Nothing is shared between rows: what one caller wrote never shows in another's speed. A row
    keeps at most max_n - min_n + 1 entries for each of its tokens, until it ends.
    """

    digest = NGRAM_DIGEST
    forward_s = 0.0  # there is no model

    def __init__(self, max_n: int = 4, min_n: int = 2) -> None:
        if not 1 <= min_n <= max_n:
            raise ValueError(f"expected 1 <= min_n <= max_n, got {min_n} and {max_n}")
        self._sizes = range(max_n, min_n - 1, -1)
        self._index: WeakKeyDictionary[Row, _Index] = WeakKeyDictionary()

    def room(self, row: Row) -> int:
        """No context bounds it: as many as the row may still emit."""
        return row.remaining

    def propose(
        self,
        rows: Sequence[Row],
        counts: Sequence[int],
        timed: Callable[[int, Callable[[], None]], None],
    ) -> None:
        """Fill `drafts` of every row whose ending occurred before, up to its count.

        Where the copied stretch reaches the row's end it goes on with the drafts themselves. A row
        stops behind an ending token. Every draft is certain, so its law is None.
        """
        live = [(row, count) for row, count in zip(rows, counts, strict=True) if count > 0]
        if live:
            timed(len(live), lambda: self._fill(live))

    def forget(self, row: Row) -> None:
        """Drop the row's index; it is built again from the row's tokens when next asked."""
        self._index.pop(row, None)

    def idle_pass(self, batch: int) -> None:
        """Nothing: a look-up costs next to no time."""

    def _fill(self, live: Sequence[tuple[Row, int]]) -> None:
        for row, count in live:
            if row not in self._index:
                self._index[row] = _Index(self._sizes)
            at = self._index[row].continuation(row.tokens)
            if at is not None:
                row.drafts += _copied(row, at, count)
                row.draft_laws += [None] * len(row.drafts)


class _Index:
    """Where each n-gram of one growing list of tokens was followed last."""

    def __init__(self, sizes: range) -> None:
        self._sizes = sizes
        self._follower: dict[tuple[int, ...], int] = {}
        self._read = 0

    def continuation(self, tokens: Sequence[int]) -> int | None:
        """The position of what followed the list's ending before, None where it is new.

        `tokens` is the list of the calls before and whatever was appended to it since.
        """
        for end in range(self._read + 1, len(tokens)):
            for size in self._sizes:
                if size <= end:
                    self._follower[tuple(tokens[end - size : end])] = end
        self._read = max(self._read, len(tokens) - 1)
        for size in self._sizes:
            if size < len(tokens):
                at = self._follower.get(tuple(tokens[-size:]))
                if at is not None:
                    return at
        return None


def _copied(row: Row, at: int, count: int) -> list[int]:
    """Up to `count` tokens from position `at` on, the copies themselves included."""
    known = len(row.tokens)
    drafts: list[int] = []
    while len(drafts) < count:
        place = at + len(drafts)
        drafts.append(row.tokens[place] if place < known else drafts[place - known])
        if is_end(drafts[-1], row.request.sampling):
            break
    return drafts
