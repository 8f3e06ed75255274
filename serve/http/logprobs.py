"""Log-probabilities in OpenAI's two forms, and the bytes that a token stands for.

Values are the target's own: natural logs before every processor, rounded.
"""

import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

from tokenizers import pre_tokenizers

from draftkeep.serve.engine.request import TokenLogprob
from draftkeep.serve.http.choice_text import Piece

# JSON has no infinity; this is as good as impossible, and what OpenAI's own answers use.
LOWEST = -9999.0
# Bits below depend on how many positions a pass had, so on what was drafted.
DECIMALS = 4
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes are themselves, the others follow from 256 on, in order."""
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    table, following = {}, 256
    for byte in range(256):
        if chr(byte) in alphabet:
            table[chr(byte)] = byte
        else:
            table[chr(following)] = byte
            following += 1
    return table


_BYTE_OF = _byte_of_character()


class TokenBytes:
    """The bytes every token id stands for, also where they are only part of a character.

    `tokenizer` is a fast tokenizer. Its decoder tells how its pieces are written: bytes as GPT-2's
    alphabet, or text with a mark for spaces and `<0x..>` for single bytes.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        steps = list(_steps(json.loads(tokenizer.backend_tokenizer.decoder.__getstate__())))
        kinds = {step["type"] for step in steps}
        self._byte_level = "ByteLevel" in kinds
        self._byte_pieces = "ByteFallback" in kinds
        self._spaces = [step["replacement"] for step in steps if step["type"] == "Metaspace"] + [
            step["pattern"]["String"]
            for step in steps
            if step["type"] == "Replace" and step["content"] == " " and "String" in step["pattern"]
        ]

    def bytes_of(self, token: int) -> bytes:
        """The token's bytes; empty for an id the tokenizer does not know."""
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:
            return b""
        if self._byte_level and all(character in _BYTE_OF for character in piece):
            return bytes(_BYTE_OF[character] for character in piece)
        byte = _BYTE_PIECE.fullmatch(piece) if self._byte_pieces else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        for mark in self._spaces:
            piece = piece.replace(mark, " ")
        return str(piece).encode("utf-8", "replace")


def chat_logprobs(pieces: Sequence[Piece], tokens: TokenBytes) -> dict[str, Any]:
    """The `logprobs` of a chat choice or chunk: an entry for every token."""
    entries = []
    for piece, known in _known(pieces):
        entry = _entry(piece.token, known.logprob, tokens)
        entry["top_logprobs"] = [_entry(token, value, tokens) for token, value in known.top]
        entries.append(entry)
    return {"content": entries, "refusal": None}


def completion_logprobs(pieces: Sequence[Piece], tokens: TokenBytes) -> dict[str, Any]:
    """The `logprobs` of a completion's choice or chunk: parallel lists over its tokens.

    A token that is no whole character is spelt `bytes:\\x..`, so that two of them stay two keys.
    The emitted token is among its own alternatives, as one more where it was not asked for.
    """
    known = list(_known(pieces))
    return {
        "tokens": [_spelt(tokens.bytes_of(piece.token)) for piece, _ in known],
        "token_logprobs": [_finite(entry.logprob) for _, entry in known],
        "top_logprobs": [_by_text(piece.token, entry, tokens) for piece, entry in known],
        "text_offset": [piece.offset for piece, _ in known],
    }


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if decoder["type"] != "Sequence":
        yield decoder
    for inner in decoder.get("decoders", []):
        yield from _steps(inner)


def _known(pieces: Sequence[Piece]) -> Iterator[tuple[Piece, TokenLogprob]]:
    for piece in pieces:
        if piece.logprob is not None:
            yield piece, piece.logprob


def _entry(token: int, logprob: float, tokens: TokenBytes) -> dict[str, Any]:
    data = tokens.bytes_of(token)
    return {
        "token": data.decode("utf-8", "replace"),
        "bytes": list(data),
        "logprob": _finite(logprob),
    }


def _by_text(emitted: int, entry: TokenLogprob, tokens: TokenBytes) -> dict[str, float]:
    found: dict[str, float] = {}
    for token, value in (*entry.top, (emitted, entry.logprob)):
        # Ids may share a spelling; the likeliest comes first and stands for it.
        found.setdefault(_spelt(tokens.bytes_of(token)), _finite(value))
    return found


def _spelt(data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(value: float) -> float:
    """NaN compares false with everything and becomes the lowest, too."""
    known = value > LOWEST and math.isfinite(value)
    return round(float(value), DECIMALS) if known else LOWEST
