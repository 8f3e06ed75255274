"""What a stream shows of how it was made: the same events of the same sizes for the same text."""

import asyncio
import copy
import itertools
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import openai
import pytest
import torch

from draftkeep.serve.engine.drafting import DraftModel
from draftkeep.serve.http import answering
from draftkeep.serve.http.obfuscation import BUCKET_BYTES
from draftkeep.serve.http.pacing import Pacer
from draftkeep.store.models.drafter import cold_drafter
from draftkeep.store.models.target import TargetModel

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HEADERS = {"Authorization": "Bearer key-of-acme"}
TICK_S = 0.004


def drafters(tiny: TargetModel) -> Iterator[DraftModel | None]:
    """None, one that is seldom right, and one that nearly always is."""
    yield None
    cold = cold_drafter(tiny, layers=1, vocab=128)
    yield DraftModel(model=cold.model, vocab_ids=cold.vocab_ids, digest=b"c" * 32)
    ids = torch.arange(tiny.vocab)
    yield DraftModel(model=copy.deepcopy(tiny.model), vocab_ids=ids, digest=b"t" * 32)


def body(path: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "How many rows?"}]
    prompt = {"messages": messages} if path == CHAT else {"prompt": "How many rows"}
    settings = {"model": "tiny", "seed": 9, "max_tokens": 40, "ignore_eos": True, "stream": True}
    return settings | prompt | fields


def lines(station: Any, path: str, **fields: Any) -> list[str]:
    """The events as they stand on the wire, [DONE] last."""
    text = station.http.post(path, json=body(path, **fields), headers=HEADERS).text
    found: list[str] = [f"{event}\n\n" for event in text.split("\n\n") if event]
    assert found[-1] == "data: [DONE]\n\n"
    return found


def said(line: str) -> dict[str, Any]:
    """An event without what differs between two requests for the same."""
    event: dict[str, Any] = json.loads(line.removeprefix("data: "))
    return {name: event[name] for name in ("choices", "usage") if name in event}


def values(part: Any) -> list[float]:
    """Every float in an event, taken out of it: their last digits are the arithmetic's."""
    found: list[float] = []
    places = part.items() if isinstance(part, dict) else enumerate(part)
    for key, value in list(places):
        if isinstance(value, float):
            found.append(value)
            part[key] = "a float"
        elif isinstance(value, (dict, list)):
            found += values(value)
    return found


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {}),
        (CHAT, {"stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 3}),
        (CHAT, {"stop": ["ing", "qq"], "temperature": 0.8}),
        (COMPLETIONS, {"logprobs": 2}),
        (COMPLETIONS, {"stream_options": {"include_obfuscation": False}}),
    ],
)
def test_events_and_sizes_are_the_same_under_every_drafter(
    station: Any, tiny: TargetModel, path: str, fields: dict[str, Any]
) -> None:
    seen, floats, accepted = [], [], []
    for drafter in drafters(tiny):
        station.node.engine.swap(drafter)
        before = station.node.engine.stats().accepted
        found = lines(station, path, **fields)
        accepted.append(station.node.engine.stats().accepted - before)
        events = [said(line) for line in found[:-1]]
        floats.append(values(events))
        seen.append(([len(line) for line in found], events))
    assert seen[0] == seen[1] == seen[2]
    assert floats[1:] == [pytest.approx(floats[0], abs=2e-4)] * 2
    assert accepted[0] < accepted[2]
    assert accepted[1] < accepted[2]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_every_token_is_one_event_of_a_full_bucket(station: Any, path: str) -> None:
    found = lines(station, path)
    assert len(found) == (path == CHAT) + 40 + 1 + 1
    assert {len(line) % BUCKET_BYTES for line in found[:-1]} == {0}
    # One bucket holds nearly every event, so a size says nothing.
    assert len({len(line) for line in found[:-1]}) == 1
    paddings = [json.loads(line.removeprefix("data: "))["obfuscation"] for line in found[:-1]]
    assert len(set(paddings)) == len(paddings)


def test_logprobs_do_not_spill_over_their_bucket(station: Any) -> None:
    found = lines(station, CHAT, logprobs=True, top_logprobs=5)
    assert len({len(line) for line in found[:-1]}) == 1


def test_padding_can_be_left_out(station: Any) -> None:
    bare = lines(station, CHAT, stream_options={"include_obfuscation": False})
    padded = lines(station, CHAT, stream_options={"include_obfuscation": True})
    assert all("obfuscation" not in line for line in bare)
    assert [said(line) for line in bare[:-1]] == [said(line) for line in padded[:-1]]
    assert len("".join(bare)) < len("".join(padded))


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_each_choice_has_events_of_its_own(station: Any, path: str) -> None:
    events = [said(line) for line in lines(station, path, n=3, ignore_eos=False)[:-1]]
    choices = [event["choices"][0] for event in events]
    whole = station.post(path, body(path, n=3, ignore_eos=False, stream=False)).json()
    for index, expected in enumerate(whole["choices"]):
        mine = [choice for choice in choices if choice["index"] == index]
        reasons = [choice["finish_reason"] for choice in mine]
        assert reasons == [None] * (len(mine) - 1) + [expected["finish_reason"]]
        if path == CHAT:
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            text = "".join(choice["delta"].get("content", "") for choice in mine)
            assert text == expected["message"]["content"]
        else:
            assert "".join(choice["text"] for choice in mine) == expected["text"]
    openings = 3 * (path == CHAT)
    assert len(choices) == openings + whole["usage"]["completion_tokens"] + 3


def test_half_a_character_is_never_streamed(station: Any, tiny: TargetModel) -> None:
    parts = tiny.tokenizer("€é😀", add_special_tokens=False)["input_ids"]
    fields = {"logit_bias": {str(token): 100 for token in parts}, "temperature": 2, "n": 4}
    whole = station.post(COMPLETIONS, body(COMPLETIONS, stream=False, **fields)).json()
    events = [said(line) for line in lines(station, COMPLETIONS, **fields)[:-1]]
    for index, expected in enumerate(whole["choices"]):
        texts = [e["choices"][0]["text"] for e in events if e["choices"][0]["index"] == index]
        assert "".join(texts) == expected["text"]
        # Whole characters come out of their last byte; what is broken stays as broken as it is.
        assert any(text == "" for text in texts)
        assert Counter("".join(texts)) == Counter(expected["text"])


class Schedule:
    """Stands for time in a paced stream: records every burst, and moves when it is slept on.

    The first sleep lasts until the engine has finished, so no stream waits for a token.
    """

    def __init__(self, station: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.engine = station.node.engine
        self.finished = self.engine.stats().finished
        self.now_s = 0.0
        self.bursts: list[tuple[float, int]] = []
        schedule = self

        class Recorded(Pacer):
            def __init__(self, choices: int, **options: Any) -> None:
                timing = {"clock": lambda: schedule.now_s, "sleep": schedule.sleep}
                schedule.finished += choices
                super().__init__(choices, **(options | timing))

            async def bursts(self, events: Any) -> AsyncIterator[str]:
                async for burst in super().bursts(events):
                    schedule.bursts.append((schedule.now_s, len(burst)))
                    yield burst

        monkeypatch.setattr(answering, "Pacer", Recorded)

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        while self.engine.stats().finished < self.finished:
            await asyncio.sleep(0.001)
        for _ in range(100):
            await asyncio.sleep(0)


@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"stop": "in"}])
def test_paced_gaps_and_sizes_are_the_same_under_every_drafter(
    stations: Callable[..., Any],
    tiny: TargetModel,
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
) -> None:
    station = stations(serve={"release": "paced", "release_tick_s": TICK_S})
    seen = []
    for drafter in drafters(tiny):
        station.node.engine.swap(drafter)
        schedule = Schedule(station, monkeypatch)
        lines(station, CHAT, **fields)
        times = [at for at, _ in schedule.bursts]
        gaps = {round(after - before, 9) for before, after in itertools.pairwise(times)}
        assert gaps == {TICK_S}
        seen.append([size for _, size in schedule.bursts])
    assert seen[0] == seen[1] == seen[2]


def test_fillers_look_like_tokens_and_mean_nothing(stations: Callable[..., Any], gate: Any) -> None:
    station = stations(serve={"release": "paced", "release_tick_s": TICK_S})
    request = {"json": body(CHAT, max_tokens=5), "headers": HEADERS}
    with station.http.stream("POST", CHAT, **request) as response:
        events = response.iter_lines()
        held = [line for line in itertools.islice(events, 20) if line]
        gate.open()
        found = held + [line for line in events if line]
    assert len({len(line) for line in found[:-1]}) == 1
    choices = [said(line)["choices"][0] for line in found[:-1]]
    assert [choice["delta"] for choice in choices[1:10]] == [{}] * 9
    plain = {**body(CHAT, max_tokens=5), "stream": False}
    answer = station.post(CHAT, plain).json()["choices"][0]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == answer["message"]["content"]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]


@pytest.mark.parametrize("n", [1, 2])
def test_the_official_client_reads_a_paced_stream(
    stations: Callable[..., Any], gate: Any, n: int
) -> None:
    station = stations(serve={"release": "paced", "release_tick_s": TICK_S})
    with openai.OpenAI(
        base_url=f"{station.url}/v1",
        api_key="key-of-acme",
        http_client=openai.DefaultHttpxClient(trust_env=False),
    ) as client:
        settings: dict[str, Any] = {"model": "tiny", "temperature": 0, "n": n}
        messages: list[Any] = [{"role": "user", "content": "How many?"}]
        with client.chat.completions.stream(messages=messages, **settings) as stream:
            for number, _ in enumerate(stream):
                if number == 10:
                    gate.open()
            streamed = stream.get_final_completion()
        whole = client.chat.completions.create(messages=messages, **settings)
    assert [choice.message.content for choice in streamed.choices] == [
        choice.message.content for choice in whole.choices
    ]


def test_a_client_that_leaves_a_paced_stream_frees_its_slots(
    stations: Callable[..., Any], gate: Any
) -> None:
    station = stations(serve={"release": "paced", "release_tick_s": TICK_S})
    request = {"json": body(CHAT, n=3, max_tokens=200), "headers": HEADERS}
    with station.http.stream("POST", CHAT, **request) as response:
        next(response.iter_lines())
        station.wait_for(lambda: station.node.engine.stats().known == 3)
    station.wait_for(lambda: station.node.engine.stats().leaving == 3)
    gate.open()
    station.wait_for(lambda: station.node.engine.stats().cancelled == 3)
    assert station.capture_stats()["drops"] == {"client_gone": 3}
