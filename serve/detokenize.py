"""Turns a growing list of token ids into text, never emitting half a character."""

from collections.abc import Sequence
from typing import Any

REPLACEMENT = "\ufffd"
# Ids kept before the unread ones, so that a decoder that treats a first token differently (a
# leading space, a byte-fallback piece) sees a token that is not the first.
CONTEXT_IDS = 6
# A UTF-8 character has at most four bytes, so at most four byte-level tokens; past that, the
# replacement character is the tokens' own text and is passed on.
MAX_HELD_IDS = 8


class Detokenizer:
    """Incremental decoding for one choice. `push` returns the text that became certain.

    The concatenation of everything returned, `flush` included, equals decoding all ids at once.
    Special tokens give no text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._start = 0  # where the context begins
        self._read = 0  # ids before this one have been emitted

    def push(self, ids: Sequence[int]) -> str:
        """Add ids; returns new text, empty while a character is still incomplete."""
        self._ids.extend(ids)
        text = self._pending()
        held = len(self._ids) - self._read
        if text.endswith(REPLACEMENT) and held <= MAX_HELD_IDS:
            return ""
        self._advance()
        return text

    def flush(self) -> str:
        """The rest, incomplete bytes as replacement characters. Call once, at the end."""
        text = self._pending()
        self._advance()
        return text

    def _pending(self) -> str:
        known = self._decode(self._ids[self._start : self._read])
        return self._decode(self._ids[self._start :])[len(known) :]

    def _advance(self) -> None:
        self._read = len(self._ids)
        self._start = max(0, self._read - CONTEXT_IDS)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(
            self._tokenizer.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )
