"""Padding: sizes are buckets, and the same for the same text whatever the arithmetic's digits."""

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from draftkeep.serve.engine.request import TokenLogprob
from draftkeep.serve.http.choice_text import Piece
from draftkeep.serve.http.logprobs import TokenBytes
from draftkeep.serve.http.obfuscation import BUCKET_BYTES, Padding
from draftkeep.serve.http.responses import Reply
from draftkeep.store.models.target import load_target

TOKENS = TokenBytes(load_target("tiny").tokenizer)
VALUES = st.floats(max_value=0) | st.sampled_from([-0.5, -1.0, -1.00004, -9998.99994, -0.0])


def event(chat: bool, text: str, tokens: list[int], logprobs: list[float]) -> dict[str, Any]:
    reply = Reply(
        chat=chat,
        response_id=b"\x01" * 16,
        created_s=1,
        model="tiny",
        fingerprint="fp",
        prompt_tokens=1,
        token_bytes=TOKENS,
    )
    top = tuple(zip(tokens, logprobs, strict=True))
    known = TokenLogprob(logprob=logprobs[0], top=top)
    return reply.token(0, Piece(token=tokens[0], text=text, offset=0, logprob=known))


@given(st.data(), st.booleans())
def test_sizes_do_not_follow_the_digits_of_log_probabilities(
    data: st.DataObject, chat: bool
) -> None:
    tokens = data.draw(st.lists(st.integers(0, 511), min_size=1, max_size=5, unique=True))
    first, second = ([data.draw(VALUES) for _ in tokens] for _ in range(2))
    padding = Padding(lambda n: "x" * n, alternatives=len(tokens))
    # A text that ends near the edge of a bucket, where a digit more could begin another.
    bare = padding.line(event(chat, "", tokens, first)).removeprefix("data: ")
    room = len(json.loads(bare)["obfuscation"])
    text = "a" * max(0, room - data.draw(st.integers(0, 80)))
    lines = [padding.line(event(chat, text, tokens, logprobs)) for logprobs in (first, second)]
    assert len(lines[0]) == len(lines[1])
    assert len(lines[0]) % padding.bucket_bytes == 0


@given(st.integers(0, 2 * BUCKET_BYTES))
def test_a_shorter_number_never_takes_less_room(length: int) -> None:
    """The text decides where in its bucket an event ends: here at every place."""
    padding = Padding(lambda n: "x" * n)
    lines = {
        len(padding.line({"text": "a" * length, "logprobs": [value]}))
        for value in (0.0, -0.5, -12.3457, -9998.9999, -9999.0)
    }
    assert len(lines) == 1
    assert lines.pop() % BUCKET_BYTES == 0


def test_what_was_padded_is_still_there() -> None:
    padding = Padding(lambda n: "x" * n)
    found = json.loads(padding.line({"a": [1, {"b": -0.25}]}).removeprefix("data: "))
    assert set(found.pop("obfuscation")) == {"x"}
    assert found == {"a": [1, {"b": -0.25}]}
