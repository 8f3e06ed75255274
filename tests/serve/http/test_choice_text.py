"""One choice's text: the same however its tokens came in blocks, and cut where it ends."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftkeep.serve.engine.request import Emission, Finish, TokenLogprob
from draftkeep.serve.http.choice_text import ChoiceText, Update

# Tokens of one to four bytes, of letters that share their bytes: characters are split over tokens,
# tokens over characters, and stops over both.
CHARACTERS = "aé😀"


def _tokenizer() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: number for number, piece in enumerate(alphabet)}
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in ("aé", "é😀", "aa", "😀a"):
        vocab["".join(piece for piece, _ in level.pre_tokenize_str(text))] = len(vocab)
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|end|>"])
    made: Any = PreTrainedTokenizerFast
    return made(tokenizer_object=core)


TOKENIZER = _tokenizer()
END = TOKENIZER.convert_tokens_to_ids("<|end|>")
LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False)


def ids_of(text: str) -> list[int]:
    """One token a byte."""
    pieces = "".join(piece for piece, _ in LEVEL.pre_tokenize_str(text))
    ids: list[int] = TOKENIZER.convert_tokens_to_ids(list(pieces))
    return ids


BYTES = ids_of(CHARACTERS)
TOKENS = st.lists(st.sampled_from([*BYTES, *range(256, len(TOKENIZER))]), min_size=1, max_size=24)
STOPS = st.lists(st.text(alphabet=CHARACTERS, min_size=1, max_size=4), max_size=4).map(tuple)
SIZES = st.lists(st.integers(1, 6), min_size=24, max_size=24)


def decode(ids: list[int]) -> str:
    return str(TOKENIZER.decode(ids, skip_special_tokens=True))


def read(
    ids: list[int],
    sizes: list[int],
    *,
    stops: tuple[str, ...] = (),
    min_tokens: int = 0,
    finish: Finish = Finish.LENGTH,
) -> Update:
    """The updates of a choice, put together."""
    text = ChoiceText(TOKENIZER, stops=stops, min_tokens=min_tokens)
    pieces: tuple[Any, ...] = ()
    rest = list(ids)
    for size in sizes:
        block, rest = rest[:size], rest[size:]
        logprobs = tuple(TokenLogprob(logprob=-float(token), top=()) for token in block)
        update = text.read(
            Emission(tokens=tuple(block), finish=None if rest else finish, logprobs=logprobs)
        )
        pieces += update.pieces
        if update.finish is not None:
            return Update(
                pieces=pieces, tail=update.tail, finish=update.finish, stop_at=update.stop_at
            )
    raise AssertionError("sizes do not cover the tokens")


def shown(update: Update) -> str:
    return "".join(piece.text for piece in update.pieces) + update.tail


@given(TOKENS, SIZES, STOPS, st.integers(0, 6))
def test_a_stop_cuts_where_searching_the_whole_text_does(
    ids: list[int], sizes: list[int], stops: tuple[str, ...], min_tokens: int
) -> None:
    update = read(ids, sizes, stops=stops, min_tokens=min_tokens)
    before = decode(ids[: max(0, min_tokens - 1)]).rstrip("\ufffd") if min_tokens > 1 else ""
    for number in range(1, len(ids) + 1):
        text = decode(ids[:number])
        ends = [
            at
            for stop in stops
            for at in range(len(text))
            if text.startswith(stop, at) and at + len(stop) > len(before)
        ]
        if number >= min_tokens and ends:
            assert (update.finish, update.stop_at) == (Finish.STOP, number)
            assert len(update.pieces) == number
            assert shown(update) == text[: min(ends)]
            return
    assert (update.finish, update.stop_at) == (Finish.LENGTH, None)
    assert shown(update) == decode(ids)


@given(TOKENS, SIZES, SIZES, STOPS)
def test_blocks_make_no_difference_to_any_token(
    ids: list[int], one: list[int], other: list[int], stops: tuple[str, ...]
) -> None:
    assert read(ids, one, stops=stops) == read(ids, other, stops=stops)


@given(TOKENS, SIZES)
def test_every_token_has_its_place_and_its_logprob(ids: list[int], sizes: list[int]) -> None:
    update = read(ids, sizes)
    assert [piece.token for piece in update.pieces] == ids
    assert [-piece.logprob.logprob for piece in update.pieces if piece.logprob] == ids
    text = shown(update)
    for number, piece in enumerate(update.pieces):
        # The token's own text begins behind every character that is whole before it.
        whole = decode(ids[:number]).rstrip("\ufffd")
        assert text[: piece.offset] == decode(ids)[: piece.offset]
        assert piece.offset >= len(whole)


@pytest.mark.parametrize("offset", range(6))
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_a_stop_at_every_place_of_a_block(offset: int, size: int) -> None:
    letters = ids_of("aaaaaa")
    emoji = ids_of("😀")
    ids = letters[:offset] + emoji + letters[offset:]
    update = read(ids, [size] * 12, stops=("😀",))
    assert (shown(update), update.stop_at) == ("a" * offset, offset + 4)


def test_whichever_end_comes_first_wins() -> None:
    a, *_ = ids_of("a")
    # The stop is complete with the last token there is room for.
    update = read([a, a, a], [3], stops=("aaa",))
    assert (update.finish, update.stop_at, shown(update)) == (Finish.STOP, 3, "")
    # EOS comes before the stop could be complete.
    update = read([a, a, END], [3], stops=("aaa",), finish=Finish.STOP)
    assert (update.finish, update.stop_at, shown(update)) == (Finish.STOP, None, "aa")
    # The stop comes before EOS in the same block.
    update = read([a, a, END], [3], stops=("a",), finish=Finish.STOP)
    assert (update.finish, update.stop_at, shown(update)) == (Finish.STOP, 1, "")


def test_the_token_that_ends_a_choice_has_no_text() -> None:
    a, *_ = ids_of("a")
    update = read([a, a], [2], finish=Finish.STOP)
    assert [piece.text for piece in update.pieces] == ["a", ""]
    assert shown(update) == "a"


def test_half_a_character_at_the_end_may_be_a_stop() -> None:
    half = BYTES[1]
    assert shown(read([half], [1])) == "\ufffd"
    update = read([half], [1], stops=("\ufffd",))
    assert (update.finish, update.stop_at, shown(update)) == (Finish.STOP, 1, "")
