"""Stop strings, matched in text that grows piece by piece."""

from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop in a growing text and holds back what may become one.

    Text is given in pieces and the output may end after any of them, at the first piece with which
    a stop is complete. There the text is cut where its earliest stop begins. What `push` and
    `flush` return is together the text up to that cut, or all of it.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._tracks = [_Track(stop) for stop in stops]
        self._held = ""

    def push(self, piece: str, *, armed: bool = True) -> tuple[str, bool]:
        """Add a piece; returns the text that no stop can reach any more, and whether one is
        complete, after which nothing may follow.

        A stop that becomes complete while not `armed` is text like any other.
        """
        text = self._held + piece
        first = len(self._held)
        cut = None
        for at, character in enumerate(piece, start=first + 1):
            for track in self._tracks:
                if track.advance(character) and armed:
                    start = at - len(track.stop)
                    cut = start if cut is None else min(cut, start)
        if cut is not None:
            self._held = ""
            return text[:cut], True
        certain = len(text) - max((track.matched for track in self._tracks), default=0)
        self._held = text[certain:]
        return text[:certain], False

    def flush(self) -> str:
        """What was held back, where the output ended without a stop."""
        held, self._held = self._held, ""
        return held


class _Track:
    """How much of one stop the text's end matches (Knuth, Morris and Pratt, 1977).

    `matched` is the length of the longest proper prefix of `stop` that the text ends with.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._shorter = _borders(stop)

    def advance(self, character: str) -> bool:
        """Take one more character; True where the text ends with the whole stop."""
        self.matched = _extend(self.stop, self._shorter, self.matched, character)
        complete = self.matched == len(self.stop)
        if complete:
            self.matched = self._shorter[-1]
        return complete


def _borders(stop: str) -> list[int]:
    """For every prefix, the length of the longest shorter prefix that it ends with."""
    borders = [0]
    for character in stop[1:]:
        borders.append(_extend(stop, borders, borders[-1], character))
    return borders


def _extend(stop: str, borders: Sequence[int], matched: int, character: str) -> int:
    while matched and stop[matched] != character:
        matched = borders[matched - 1]
    return matched + (stop[matched] == character)
