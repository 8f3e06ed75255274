"""Class I: what a strict client of OpenAI's may rely on, event by event."""

import json
import math
from typing import Any

import pytest

from tests.faults.house import (
    CHAT,
    COMPLETIONS,
    LOOKAHEAD,
    House,
    body_for,
    piece_of,
    text_of,
)

HEADERS = {"Authorization": "Bearer key-of-acme"}
REASONS = {"stop", "length"}


def _lines(house: House, path: str, **fields: Any) -> list[str]:
    """The raw lines of a stream."""
    body = body_for(path, stream=True, **fields)
    with house.station.http.stream("POST", path, json=body, headers=HEADERS) as response:
        assert response.status_code == 200
        return [line for line in response.iter_lines() if line]


def _check_head(event: dict[str, Any], first: dict[str, Any], path: str) -> None:
    kind = "chat.completion.chunk" if path == CHAT else "text_completion"
    assert (event["id"], event["model"], event["created"]) == (
        first["id"],
        "tiny",
        first["created"],
    )
    assert event["id"]
    assert event["object"] == kind


def _check_choice(choice: dict[str, Any], seen: list[str], ended: set[int], path: str) -> None:
    """One event of one choice; `seen` are the texts of that choice so far."""
    index = choice["index"]
    assert index not in ended, "an event behind the finish reason"
    assert "finish_reason" in choice, "missing, not null"
    reason = choice["finish_reason"]
    assert reason is None or reason in REASONS
    if path == CHAT:
        delta = choice["delta"]
        if not seen:
            assert delta == {"role": "assistant", "content": ""}
        else:
            assert "role" not in delta
            assert delta.get("content", "") is not None
    else:
        assert isinstance(choice["text"], str)
    seen.append(piece_of(choice))
    if reason is not None:
        ended.add(index)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("usage", [True, False])
def test_every_event_of_a_stream(house: House, path: str, n: int, usage: bool) -> None:
    """anomalyco/opencode#42918, sgl#3912, #18335, vllm#19662, tgi#1648, lcpp#20226,
    Arthur-Ficial/apfel#100: empty ids, finish reasons missing or empty, null roles, an index that
    counted tokens or was always 0, usage that nobody asked for, trailers.

    The grammar: for every choice its opening, its tokens, one end; then the usage if asked for;
    then [DONE]; and nothing else.
    """
    fields: dict[str, Any] = {"n": n, "temperature": 0.9, "max_tokens": 20, "min_tokens": 4}
    whole = house.answers(path, **fields)
    asked = {"stream_options": {"include_usage": True}} if usage else {}
    *data, done = _lines(house, path, **fields, **asked)
    assert done == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in data]
    for event in events:
        _check_head(event, events[0], path)
    if usage:
        last = events.pop()
        assert last["choices"] == []
        assert last["usage"] == house.ask(path, **fields)["usage"]
    assert all(event.get("usage") is None for event in events)
    assert all(("usage" in event) == usage for event in events)
    texts: dict[int, list[str]] = {index: [] for index in range(n)}
    ended: set[int] = set()
    for event in events:
        (choice,) = event["choices"]
        _check_choice(choice, texts[choice["index"]], ended, path)
    assert ended == set(range(n))
    assert {index: "".join(parts) for index, parts in texts.items()} == {
        choice["index"]: text_of(choice) for choice in whole
    }
    finals = {e["choices"][0]["index"]: e["choices"][0]["finish_reason"] for e in events}
    assert finals == {choice["index"]: choice["finish_reason"] for choice in whole}
    if n > 1:
        assert len({text_of(choice) for choice in whole}) == n


def test_the_three_endings_of_an_answer(house: House) -> None:
    """ModelTC/LightLLM#130: the reason always null, stop unsupported, and the EOS shown."""
    for seed in range(20):
        (choice,) = house.answers(CHAT, seed=seed, temperature=0.7, max_tokens=60)
        if choice["finish_reason"] == "stop":
            break
    text = text_of(choice)
    assert choice["finish_reason"] == "stop"
    assert "<|im_end|>" not in text
    fields: dict[str, Any] = {"seed": seed, "temperature": 0.7}
    cut = house.answers(CHAT, **fields, max_tokens=60, stop=[text[3:6]])[0]
    assert (text_of(cut), cut["finish_reason"]) == (text[: text.index(text[3:6])], "stop")
    short = house.answers(CHAT, **fields, max_tokens=3)[0]
    assert short["finish_reason"] == "length"
    for expected, asked in (
        (choice, {"max_tokens": 60}),
        (cut, {"max_tokens": 60, "stop": [text[3:6]]}),
        (short, {"max_tokens": 3}),
    ):
        events = [event["choices"][0] for event in house.stream(CHAT, **fields, **asked)]
        assert "".join(map(piece_of, events)) == text_of(expected)
        assert [event["finish_reason"] for event in events] == [None] * (len(events) - 1) + [
            expected["finish_reason"]
        ]


def _spelling(house: House, text: str) -> list[int]:
    """The ids of a text's bytes, which must be different ones."""
    ids: list[int] = house.tokenizer(text)["input_ids"]
    assert len(ids) == len(set(ids)) == len(text.encode())
    return ids


def _dictated(ids: list[int]) -> dict[str, Any]:
    """A request that is answered with exactly these different tokens.

    Each is liked less than the one before it, and a penalty takes away what was said already.
    """
    return {
        "temperature": 0,
        "repetition_penalty": 10,
        "logit_bias": {str(token): 100 - 15 * place for place, token in enumerate(ids)},
        "max_tokens": len(ids),
        "ignore_eos": True,
        "text": "a",
    }


@pytest.mark.parametrize("text", ["č", "漢", "😀", "é", "ďé"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_character_of_several_tokens_comes_in_one_piece(
    house: House, path: str, text: str
) -> None:
    """waybarrios/vllm-mlx#109, #195: a Czech letter or an emoji over two tokens came as U+FFFD.

    Streamed with drafts of every length, so that a block ends at every byte of it.
    """
    fields = _dictated(_spelling(house, text))
    (choice,) = house.answers(path, **fields)
    assert text_of(choice) == text
    for lookahead in (0, 1, 2, LOOKAHEAD):
        house.speculate(lookahead)
        pieces = [piece_of(event["choices"][0]) for event in house.stream(path, **fields)]
        assert "".join(pieces) == text
        assert [piece for piece in pieces if piece] == list(text)


@pytest.mark.parametrize("text", ["č", "漢", "😀"])
def test_a_stop_of_several_tokens_is_seen_when_it_is_whole(house: House, text: str) -> None:
    """Blaizzy/mlx-vlm#1771: what was in the buffer when something else ended was lost or shown."""
    fields = _dictated(_spelling(house, text)) | {"max_tokens": 20, "stop": text}
    (choice,) = house.answers(COMPLETIONS, **fields)
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    asked = {"stream_options": {"include_usage": True}}
    *events, last = house.stream(COMPLETIONS, **fields, **asked)
    assert last["usage"]["completion_tokens"] == len(text.encode())
    assert {piece_of(event["choices"][0]) for event in events} == {""}


def test_each_choice_and_each_prompt_has_its_own_index(house: House) -> None:
    """tgi#1648, lcpp#20226: the index counted tokens, or was that of the first choice."""
    fields: dict[str, Any] = {"temperature": 0.9, "min_tokens": 4}
    prompts = ["How many rows", "def f(x):"]
    alone = [
        text_of(choice)
        for prompt in prompts
        for choice in house.ask(COMPLETIONS, prompt=prompt, n=2, **fields)["choices"]
    ]
    choices = house.answers(COMPLETIONS, prompt=prompts, n=2, **fields)
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [text_of(choice) for choice in choices] == alone
    assert len(set(alone)) == 4
    events = house.stream(COMPLETIONS, prompt=prompts, n=2, **fields)
    for index in range(4):
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert "".join(map(piece_of, mine)) == alone[index]
    # One choice is the first of several.
    one = house.ask(COMPLETIONS, prompt=prompts[1], **fields)["choices"][0]
    assert text_of(one) == alone[2]


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_that_stays_unfinished_is_shown_as_such(house: House, cut: int) -> None:
    """replicate/cog-llama-template#75, Blaizzy/mlx-vlm#1771: replacement characters were stripped,
    and what a buffer held at the end was lost.

    The answer breaks off inside an emoji: one replacement character, at the end and not before.
    """
    fields = _dictated(_spelling(house, "😀")[:cut])
    (choice,) = house.answers(COMPLETIONS, **fields)
    assert choice["text"] == "\ufffd"
    house.speculate(LOOKAHEAD)
    pieces = [piece_of(event["choices"][0]) for event in house.stream(COMPLETIONS, **fields)]
    assert pieces == [""] * cut + ["\ufffd"]


@pytest.mark.parametrize("seed", range(6))
def test_any_bytes_stream_as_they_are_answered(house: House, seed: int) -> None:
    """waybarrios/vllm-mlx#109, replicate/cog-llama-template#75: random pieces of characters give
    one text, streamed, whole, and by the tokenizer."""
    pieces = [token for text in ("č", "漢", "😀") for token in _spelling(house, text)]
    fields: dict[str, Any] = {
        "temperature": 2,
        "seed": seed,
        "max_tokens": 30,
        "ignore_eos": True,
        "logit_bias": {str(token): 60 for token in pieces},
    }
    (choice,) = house.answers(CHAT, **fields)
    events = house.stream(CHAT, **fields)
    assert "".join(piece_of(event["choices"][0]) for event in events) == text_of(choice)
    assert "\ufffd" in text_of(choice)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_sizes_and_counts_of_events_do_not_tell_what_was_accepted(house: House, path: str) -> None:
    """arXiv 2411.01076: tokens per event, 1, 1, 5, 1, are a fingerprint of the prompt.

    The lengths of all lines of a stream are the same with no drafts, with blocks that are accepted
    whole and with drafts that are mostly rejected.
    """
    fields: dict[str, Any] = {"temperature": 0.8, "max_tokens": 25, "ignore_eos": True}
    sizes = []
    for lookahead in (0, 1, LOOKAHEAD, 16):
        house.speculate(lookahead)
        before = house.idle().accepted
        # With the two line ends of every event.
        sizes.append([len(line) + 2 for line in _lines(house, path, **fields)])
        assert (house.idle().accepted > before) == (lookahead > 0)
    assert sizes[0] == sizes[1] == sizes[2] == sizes[3]
    # One event for every token, beside the opening, the end and [DONE]; all in whole buckets, so
    # that the length of a token's text does not show either.
    assert len(sizes[0]) == 25 + 2 + (path == CHAT)
    assert math.gcd(*sizes[0][:-1]) >= 64
