"""Streamed text is the whole text, cut only between characters."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftkeep.serve.http.detokenize import REPLACEMENT, Detokenizer
from draftkeep.store.models.target import load_target

SPECIALS = ["<|end|>", "<|start|>"]


def _tokenizer(vocab: dict[str, int], decoder: Any, **model: Any) -> Any:
    core = Tokenizer(models.BPE(vocab=vocab, merges=[], **model))
    core.decoder = decoder
    core.add_special_tokens(SPECIALS)
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_object=core)


def byte_level() -> Any:
    """One token a byte and two special ones, as in GPT-2 and its descendants."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return _tokenizer({piece: i for i, piece in enumerate(alphabet)}, decoders.ByteLevel())


def byte_fallback() -> Any:
    """Words with a leading-space mark and byte pieces, as in Llama 2."""
    words = ["▁", "▁Ahoj", "▁světe", "a", "é", "😀"]
    pieces = words + [f"<0x{byte:02X}>" for byte in range(256)]
    chain = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _tokenizer({piece: i for i, piece in enumerate(pieces)}, chain, byte_fallback=True)


BYTES, FALLBACK = byte_level(), byte_fallback()
# The alphabet stands for printable bytes by themselves and for the others from 256 on, in order.
PRINTABLE = {*range(33, 127), *range(161, 173), *range(174, 256)}
OTHERS = [byte for byte in range(256) if byte not in PRINTABLE]
ID_OF_BYTE = [
    BYTES.convert_tokens_to_ids(chr(byte if byte in PRINTABLE else 256 + OTHERS.index(byte)))
    for byte in range(256)
]


def streamed(tokenizer: Any, parts: list[list[int]]) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [*(detokenizer.push(part) for part in parts), detokenizer.flush()]


def whole(tokenizer: Any, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


@given(st.lists(st.lists(st.integers(0, len(BYTES) - 1), max_size=5), max_size=30))
def test_any_ids_in_any_parts_give_the_whole_text(parts: list[list[int]]) -> None:
    ids = [token for part in parts for token in part]
    assert "".join(streamed(BYTES, parts)) == whole(BYTES, ids)


@given(st.lists(st.binary(max_size=4), max_size=30))
def test_runs_of_broken_characters_give_the_whole_text(runs: list[bytes]) -> None:
    data = b"".join(bytes(0x80 | byte for byte in run) for run in runs)
    ids = [ID_OF_BYTE[byte] for byte in data]
    assert "".join(streamed(BYTES, [[token] for token in ids])) == whole(BYTES, ids)


@given(st.text(), st.integers(0, 3))
def test_no_event_splits_a_character(text: str, stride: int) -> None:
    ids = [ID_OF_BYTE[byte] for byte in text.encode()]
    size = stride + 1
    parts = [ids[start : start + size] for start in range(0, len(ids), size)]
    events = streamed(BYTES, parts)
    assert "".join(events) == text
    if REPLACEMENT not in text:
        assert all(REPLACEMENT not in event for event in events)


@given(st.text(alphabet="Ahoj světe 😀é漢", max_size=20), st.integers(1, 3))
def test_byte_pieces_are_held_until_the_character_is_whole(text: str, size: int) -> None:
    ids = [
        token
        for character in text
        for token in (
            [FALLBACK.convert_tokens_to_ids(character)]
            if character in ("a", "é")
            else [FALLBACK.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in character.encode()]
        )
    ]
    parts = [ids[start : start + size] for start in range(0, len(ids), size)]
    events = streamed(FALLBACK, parts)
    assert "".join(events) == whole(FALLBACK, ids)
    assert all(REPLACEMENT not in event for event in events)


def test_a_leading_space_mark_is_a_space_after_the_first_token() -> None:
    ids = FALLBACK.convert_tokens_to_ids(["▁Ahoj", "▁světe", "▁Ahoj", "▁", "a", "▁světe", "▁Ahoj"])
    events = streamed(FALLBACK, [[token] for token in ids])
    assert events[:3] == ["Ahoj", " světe", " Ahoj"]
    assert "".join(events) == whole(FALLBACK, ids)


def test_special_tokens_inside_a_character_leave_it_whole() -> None:
    euro = [ID_OF_BYTE[byte] for byte in "€".encode()]
    special = BYTES.convert_tokens_to_ids(SPECIALS[0])
    ids = [euro[0], *[special] * 20, euro[1], euro[2]]
    assert streamed(BYTES, [[token] for token in ids]) == [*[""] * 22, "€", ""]


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    detokenizer = Detokenizer(BYTES)
    assert detokenizer.push([ID_OF_BYTE[byte] for byte in b"ab\xe2\x82"]) == "ab"
    assert detokenizer.flush() == REPLACEMENT


def test_endless_broken_bytes_keep_the_window_small() -> None:
    detokenizer = Detokenizer(BYTES)
    for _ in range(1000):
        detokenizer.push([ID_OF_BYTE[0x80]])
        assert len(detokenizer._window) < 20


@pytest.mark.parametrize("size", [1, 2, 5])
def test_the_toy_targets_own_text(size: int) -> None:
    tokenizer = load_target("tiny").tokenizer
    text = "def čtvrtek(x): return '😀 漢字'  # naïve\n\n"
    ids = tokenizer(text)["input_ids"]
    parts = [ids[start : start + size] for start in range(0, len(ids), size)]
    assert "".join(streamed(tokenizer, parts)) == text
