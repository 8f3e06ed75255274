"""Turns a growing list of token ids into text, never emitting half a character."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

REPLACEMENT = "\ufffd"
# A character has at most four bytes, so at most four ids; past that a replacement character is
# what the ids mean, and only the last one can still change.
MAX_HELD_IDS = 8


class Detokenizer:
    """Incremental decoding for one choice. `push` returns the text that became certain.

    The concatenation of everything returned, `flush` included, equals decoding all ids at once;
    except that a decoder of byte pieces, which gives up a whole run of them for one broken byte,
    is taken at its word as the run grows. Special tokens give no text.

    The window is what was emitted last and everything since: a decoder that treats a first token
    differently (a leading space) sees one that is not the first, and it begins where a character
    does.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = special_ids(tokenizer)
        self._window: list[int] = []
        self._held = 0  # ids at the window's end that are not fully emitted
        self._sent = 0  # characters of the window's text that were emitted

    def push(self, ids: Sequence[int]) -> str:
        """Add ids; returns new text, empty while a character is still incomplete.

        What is returned up to a point does not depend on how the ids came in parts.
        """
        return "".join([self._push(token) for token in ids if token not in self._special])

    def flush(self) -> str:
        """The rest, incomplete bytes as replacement characters. Call once, at the end."""
        return self._decode()[self._sent :]

    def _push(self, token: int) -> str:
        self._window.append(token)
        self._held += 1
        text = self._decode()
        open_end = text.endswith(REPLACEMENT)
        if open_end and self._held <= MAX_HELD_IDS:
            return ""
        new = text[self._sent : len(text) - open_end]
        self._window = self._window[-self._held :]
        self._held = 0
        self._sent = max(0, len(self._decode()) - open_end)
        return new

    def _decode(self) -> str:
        return whole_text(self._tokenizer, self._window)


@lru_cache(maxsize=4)
def special_ids(tokenizer: Any) -> frozenset[int]:
    """The ids that give no text. Listed once for a tokenizer, which may have hundreds of them."""
    added = tokenizer.added_tokens_decoder
    return frozenset(token for token, entry in added.items() if entry.special)


def whole_text(tokenizer: Any, ids: Sequence[int]) -> str:
    """What ids mean together. Special tokens give no text."""
    return str(
        tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )
