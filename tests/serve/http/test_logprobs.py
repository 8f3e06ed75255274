"""The bytes of every token, and log-probabilities in both forms."""

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftkeep.serve.engine.request import TokenLogprob
from draftkeep.serve.http.choice_text import Piece
from draftkeep.serve.http.logprobs import LOWEST, TokenBytes, chat_logprobs, completion_logprobs
from draftkeep.store.models.target import load_target


def tokenizer_of(vocab: dict[str, int], decoder: Any, **model: Any) -> Any:
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], **model))
    core.decoder = decoder
    core.add_special_tokens(["<|end|>"])
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_object=core)


def numbered(pieces: list[str]) -> dict[str, int]:
    return {piece: number for number, piece in enumerate(pieces)}


LEVEL = tokenizer_of(numbered(sorted(pre_tokenizers.ByteLevel.alphabet())), decoders.ByteLevel())
WORDS = ["▁", "▁Ahoj", "▁světe", "a", "é", "😀"]
FALLBACK = tokenizer_of(
    numbered(WORDS + [f"<0x{byte:02X}>" for byte in range(256)]),
    decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
    byte_fallback=True,
)
TINY = load_target("tiny").tokenizer
MARKED = tokenizer_of(numbered(WORDS), decoders.Metaspace())


def test_each_byte_has_one_token_and_each_token_its_byte() -> None:
    tokens = TokenBytes(LEVEL)
    assert sorted(tokens.bytes_of(token) for token in range(256)) == [
        bytes([byte]) for byte in range(256)
    ]
    assert tokens.bytes_of(256) == b"<|end|>"
    assert tokens.bytes_of(257) == b""


@given(st.text())
def test_the_bytes_of_a_texts_tokens_are_the_texts(text: str) -> None:
    tokens = TokenBytes(TINY)
    ids = TINY(text, add_special_tokens=False)["input_ids"]
    joined = b"".join(tokens.bytes_of(token) for token in ids)
    assert joined.decode() == text


@pytest.mark.parametrize("tokenizer", [FALLBACK, MARKED])
def test_a_mark_is_a_space(tokenizer: Any) -> None:
    tokens = TokenBytes(tokenizer)
    ids = tokenizer.convert_tokens_to_ids(["▁Ahoj", "▁", "▁světe", "é", "😀"])
    assert b"".join(tokens.bytes_of(token) for token in ids).decode() == " Ahoj  světeé😀"


def test_a_byte_piece_is_its_byte() -> None:
    tokens = TokenBytes(FALLBACK)
    ids = FALLBACK.convert_tokens_to_ids(["<0xF0>", "<0x9F>", "<0x98>", "<0x80>"])
    assert [tokens.bytes_of(token) for token in ids] == [b"\xf0", b"\x9f", b"\x98", b"\x80"]


def piece(token: int, logprob: float, top: tuple[tuple[int, float], ...], offset: int = 0) -> Piece:
    return Piece(
        token=token, text="", offset=offset, logprob=TokenLogprob(logprob=logprob, top=top)
    )


def level_id(byte: int) -> int:
    tokens = TokenBytes(LEVEL)
    return next(token for token in range(256) if tokens.bytes_of(token) == bytes([byte]))


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e30, LOWEST])
def test_what_json_cannot_say_is_the_lowest(value: float) -> None:
    one = piece(level_id(65), value, ((level_id(66), -0.5), (level_id(67), value)))
    chat = chat_logprobs([one], TokenBytes(LEVEL))
    (entry,) = chat["content"]
    assert entry["logprob"] == LOWEST
    assert [top["logprob"] for top in entry["top_logprobs"]] == [-0.5, LOWEST]
    completion = completion_logprobs([one], TokenBytes(LEVEL))
    assert completion["token_logprobs"] == [LOWEST]
    assert completion["top_logprobs"] == [{"B": -0.5, "C": LOWEST, "A": LOWEST}]
    json.dumps([chat, completion], allow_nan=False)


def test_parts_of_characters_stay_apart() -> None:
    top = ((level_id(0xF0), -0.1), (level_id(0xE2), -2.0), (level_id(65), -3.0))
    one = piece(level_id(0xE2), -2.0, top)
    (entry,) = chat_logprobs([one], TokenBytes(LEVEL))["content"]
    assert (entry["token"], entry["bytes"]) == ("\ufffd", [0xE2])
    assert [top["bytes"] for top in entry["top_logprobs"]] == [[0xF0], [0xE2], [65]]
    completion = completion_logprobs([one], TokenBytes(LEVEL))
    assert completion["tokens"] == ["bytes:\\xe2"]
    assert completion["top_logprobs"] == [{"bytes:\\xf0": -0.1, "bytes:\\xe2": -2.0, "A": -3.0}]


def test_an_emitted_token_outside_the_list_is_added_where_openai_does() -> None:
    one = piece(level_id(65), -5.0, ((level_id(66), -0.1),), offset=7)
    (entry,) = chat_logprobs([one], TokenBytes(LEVEL))["content"]
    assert [top["token"] for top in entry["top_logprobs"]] == ["B"]
    completion = completion_logprobs([one, one], TokenBytes(LEVEL))
    assert completion["top_logprobs"] == [{"B": -0.1, "A": -5.0}] * 2
    assert completion["text_offset"] == [7, 7]
