"""Stop strings end an answer where they would in the whole text, inside every accepted block."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from draftkeep.serve.engine.drafting import DraftModel
from draftkeep.serve.engine.request import Finish
from draftkeep.store.models.target import TargetModel

COMPLETIONS = "/v1/completions"
LENGTH = 24
STREAM = {"stream": True, "stream_options": {"include_usage": True}}


def twin(tiny: TargetModel) -> DraftModel:
    """The target as its own drafter: nearly every block is accepted whole."""
    return DraftModel(
        model=copy.deepcopy(tiny.model), vocab_ids=torch.arange(tiny.vocab), digest=bytes(32)
    )


@pytest.fixture(scope="module")
def drafting(station: Any, tiny: TargetModel) -> Iterator[Any]:
    station.node.engine.swap(twin(tiny))
    yield station
    station.node.engine.swap(None)


def body(**fields: Any) -> dict[str, Any]:
    settings = {"model": "tiny", "prompt": "How many", "seed": 5, "max_tokens": LENGTH}
    return settings | {"ignore_eos": True, "temperature": 1.2} | fields


def complete(station: Any, **fields: Any) -> tuple[str, str, int]:
    """(text, finish reason, output tokens), which must be the same whole and streamed."""
    whole = station.post(COMPLETIONS, body(**fields)).json()
    (choice,) = whole["choices"]
    *events, usage = station.stream(COMPLETIONS, body(**fields, **STREAM))
    assert "".join(event["choices"][0]["text"] for event in events) == choice["text"]
    assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert usage["usage"] == whole["usage"]
    # One event a token, and the end.
    assert len(events) == usage["usage"]["completion_tokens"] + 1
    return choice["text"], choice["finish_reason"], whole["usage"]["completion_tokens"]


def tokens_of(station: Any, **fields: Any) -> list[str]:
    """The text that became certain with each token of the answer without stops."""
    events = station.stream(COMPLETIONS, body(stream=True, **fields))
    return [event["choices"][0]["text"] for event in events[:-1]]


def cut(pieces: list[str], *stops: str) -> tuple[str, str, int]:
    """What `complete` must give with these stops, by searching the whole text."""
    for number in range(1, len(pieces) + 1):
        text = "".join(pieces[:number])
        found = [text.find(stop) for stop in stops if stop in text]
        if found:
            return text[: min(found)], "stop", number
    return "".join(pieces), "length", len(pieces)


@pytest.mark.parametrize("size", [1, 3, 9])
def test_a_stop_at_every_place_of_an_answer(drafting: Any, size: int) -> None:
    pieces = tokens_of(drafting)
    text = "".join(pieces)
    before = drafting.node.engine.stats()
    for start in range(0, len(text) - size, 3):
        stop = text[start : start + size]
        assert complete(drafting, stop=stop) == cut(pieces, stop)
    after = drafting.node.engine.stats()
    # Blocks were accepted, so most stops lay inside one.
    assert after.accepted - before.accepted > after.steps - before.steps


def test_several_stops_and_one_that_never_comes(drafting: Any) -> None:
    pieces = tokens_of(drafting)
    text = "".join(pieces)
    stops = [text[20:23], text[12:14], text[16:24], "never there"]
    assert complete(drafting, stop=stops) == cut(pieces, *stops)
    assert complete(drafting, stop=["never there", text[-1] + "never"]) == cut(pieces)


def test_a_stop_complete_with_the_last_token_is_a_stop(drafting: Any) -> None:
    pieces = tokens_of(drafting)
    number = next(n for n in range(4, LENGTH) if pieces[n] and pieces[n] not in "".join(pieces[:n]))
    found = complete(drafting, stop=pieces[number], max_tokens=number + 1)
    assert found == ("".join(pieces[:number]), "stop", number + 1)
    found = complete(drafting, stop=pieces[number], max_tokens=number)
    assert found == ("".join(pieces[:number]), "length", number)


def test_the_model_may_end_before_or_after_a_stop(drafting: Any) -> None:
    question = [{"role": "user", "content": "Ada has 30 apples and gives 5 to Ben. How many?"}]
    settings = {"messages": question, "max_tokens": 100, "temperature": 0, "model": "tiny"}

    def ask(**fields: Any) -> Any:
        return drafting.post("/v1/chat/completions", {**settings, **fields}).json()

    plain = ask()
    text = plain["choices"][0]["message"]["content"]
    assert plain["choices"][0]["finish_reason"] == "stop"
    never = ask(stop="never there")
    assert (never["choices"], never["usage"]) == (plain["choices"], plain["usage"])
    last = ask(stop=text[-1])
    assert last["choices"][0]["message"]["content"] == text[: text.find(text[-1])]
    assert last["usage"]["completion_tokens"] < plain["usage"]["completion_tokens"]


def test_min_tokens_holds_stops_off(drafting: Any) -> None:
    letter = "e"
    pieces = tokens_of(drafting, min_tokens=10)
    early, late = "".join(pieces[:9]), "".join(pieces)
    assert letter in early
    assert letter in late[len(early) :]
    text, reason, tokens = complete(drafting, stop=letter, min_tokens=10)
    assert text == late[: late.find(letter, len(early))]
    assert reason == "stop"
    assert tokens >= 10


def test_stop_ids_end_it_without_their_text(drafting: Any) -> None:
    tokenizer = drafting.node.target.tokenizer
    pieces = tokens_of(drafting)
    ids = [tokenizer(piece, add_special_tokens=False)["input_ids"] for piece in pieces]
    at = next(n for n in range(3, LENGTH) if len(ids[n]) == 1 and pieces.index(pieces[n]) == n)
    found = complete(drafting, stop_token_ids=[*ids[at], 400])
    assert found == ("".join(pieces[:at]), "stop", at + 1)


def test_each_choice_is_cut_by_itself(drafting: Any) -> None:
    plain = drafting.post(COMPLETIONS, body(n=4)).json()["choices"]
    stopped = drafting.post(COMPLETIONS, body(n=4, stop="a")).json()["choices"]
    assert [choice["text"] for choice in stopped] == [
        choice["text"].split("a")[0] for choice in plain
    ]
    events = drafting.stream(COMPLETIONS, body(n=4, stop="a", stream=True))
    ends = [e["choices"][0] for e in events if e["choices"][0]["finish_reason"]]
    assert {end["index"]: end["finish_reason"] for end in ends} == {
        choice["index"]: choice["finish_reason"] for choice in stopped
    }


def test_no_drafter_changes_where_it_ends(drafting: Any, tiny: TargetModel) -> None:
    answers = []
    for drafter in (None, twin(tiny)):
        drafting.node.engine.swap(drafter)
        answers.append([complete(drafting, stop=[stop, "ing"], seed=8) for stop in "aeiou "])
    assert answers[0] == answers[1]


def test_the_trace_ends_with_the_token_that_completed_the_stop(
    stations: Callable[..., Any], tiny: TargetModel
) -> None:
    station = stations()
    station.node.engine.swap(twin(tiny))
    answer = station.post(COMPLETIONS, body(stop="e", n=3)).json()
    traces = {trace.choice: trace for _, trace in station.captured()}
    assert set(traces) == {0, 1, 2}
    for choice in answer["choices"]:
        trace = traces[choice["index"]]
        text = tiny.tokenizer.decode(trace.output_ids_T)
        assert text.split("e")[0] == choice["text"]
        assert "e" not in tiny.tokenizer.decode(trace.output_ids_T[:-1])
        assert trace.finish is Finish.STOP
    total = sum(trace.positions for trace in traces.values())
    assert total == answer["usage"]["completion_tokens"]


def test_a_tokenizer_that_fails_is_an_error_and_not_a_silence(
    station: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("draftkeep.serve.http.choice_text.Detokenizer.push", fail)
    for stop in (None, "a"):
        response = station.post(COMPLETIONS, body(stop=stop))
        assert response.status_code == 500
        assert response.json()["error"]["type"] == "server_error"
        (event,) = station.stream(COMPLETIONS, body(stop=stop, stream=True))
        assert "RuntimeError" in event["error"]["message"]
    monkeypatch.undo()
    assert station.post(COMPLETIONS, body(stop="a")).status_code == 200
    station.wait_for(lambda: station.node.engine.stats().running == 0)
