"""Class H: a log-probability is the target's own, one for every token, wherever it was accepted."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine.request import Finished
from tests.faults.house import (
    CHAT,
    COMPLETIONS,
    LOOKAHEAD,
    QUESTION,
    House,
    body_for,
    text_of,
)
from tests.faults.plain import plain_output
from tests.serve.script import Script

TOP = 5
TOLERANCE = 1e-4
BLOCK = LOOKAHEAD + 1


def _assert_true(lab: Any, reply: Any) -> None:
    """Every entry is the log-softmax of a fresh pass over everything before its token."""
    prompt = list(reply.request.prompt_ids)
    rows = torch.from_numpy(lab.logits(prompt + reply.tokens)).log_softmax(-1).numpy()
    rows = rows[len(prompt) - 1 : -1]
    assert len(reply.logprobs) == len(reply.tokens)
    for row, token, entry in zip(rows, reply.tokens, reply.logprobs, strict=True):
        assert abs(entry.logprob - row[token]) < TOLERANCE
        assert len(entry.top) == reply.request.top_logprobs
        assert [abs(row[token] - value) < TOLERANCE for token, value in entry.top] == (
            [True] * len(entry.top)
        )
        best = np.sort(row)[::-1][: len(entry.top)]
        np.testing.assert_allclose([value for _, value in entry.top], best, atol=TOLERANCE)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("drafter", ["copy", "noisy", "random", "none"])
def test_values_are_those_of_a_fresh_pass(lab: Any, drafter: str, rule: str) -> None:
    """lcpp#27972, #27196, #10783, vllm#17876, sgl#10660, #14046: 0.0 everywhere, nothing after the
    first token, or nothing at all, as soon as anything drafted.

    Raw values: the request's filters, penalties and temperature do not show in them.
    """
    samplings = (
        Sampling(temperature=0.0),
        Sampling(temperature=0.7, top_p=0.5, presence_penalty=0.7),
        Sampling(temperature=1.5, logit_bias=((4, -100.0),)),
    )
    engine = lab.engine(drafter=drafter, lookahead=3, verification=rule)
    replies = [
        lab.request(str(i), p, sampling=samplings[i], seed=i, top_logprobs=(TOP, 0, 20)[i])
        for i, p in enumerate(lab.prompts((4, 1, 17)))
    ]
    silent = lab.request("silent", (1, 2))
    lab.run(engine, [*replies, silent])
    for reply in replies:
        _assert_true(lab, reply)
    assert silent.logprobs == []


@pytest.mark.parametrize("wrong", range(BLOCK))
def test_values_around_a_rejection_at_every_offset(lab: Any, wrong: int) -> None:
    """dphnAI/sonar#904, vllm#17876: at an accepted draft, at the correction and behind it."""
    prompt = lab.prompts([4])[0]
    sampling = Sampling(temperature=1.0)
    plan = plain_output(lab, prompt, sampling, tokens=14, seed=3)
    plan[wrong] = (plan[wrong] + 1) % 48
    engine = lab.engine(floor=Script({"a": plan}), lookahead=LOOKAHEAD)
    reply = lab.request(
        "a", prompt, max_tokens=14, sampling=sampling, seed=3, top_logprobs=TOP, capture=False
    )
    lab.run(engine, [reply])
    _assert_true(lab, reply)


@pytest.mark.parametrize("capture_k", [0, 2, 12])
@pytest.mark.parametrize("drafter", ["noisy", "none"])
def test_values_do_not_depend_on_what_is_captured(lab: Any, drafter: str, capture_k: int) -> None:
    """sgl#14046: entries came from a step that only some tokens went through.

    And the other way round: what is captured is not cut to what a caller asked for.
    """
    finished: list[Finished] = []
    engine = lab.engine(
        drafter=drafter, lookahead=3, capture_k=capture_k, on_finish=finished.append
    )
    prompts = lab.prompts((4, 9))
    replies = [lab.request(str(i), p, top_logprobs=(TOP, None)[i]) for i, p in enumerate(prompts)]
    lab.run(engine, replies)
    _assert_true(lab, replies[0])
    for one in finished:
        prompt, output = list(one.request.prompt_ids), one.output_ids_T.tolist()
        rows = torch.from_numpy(lab.logits(prompt + output)).log_softmax(-1).numpy()
        best = -np.sort(-rows[len(prompt) - 1 : -1], axis=-1)[:, :capture_k]
        np.testing.assert_allclose(one.logprobs_TK, best, atol=TOLERANCE)


def _assert_close(one: Any, other: Any) -> None:
    """Equal, but for the last bits of numbers."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            _assert_close(one[key], other[key])
    elif isinstance(one, list):
        for left, right in zip(one, other, strict=True):
            _assert_close(left, right)
    elif isinstance(one, float):
        assert abs(one - other) < TOLERANCE
    else:
        assert one == other


def _strict(text: str) -> Any:
    """JSON as the standard has it, which knows no NaN and no infinity."""

    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def _bytes(entry: dict[str, Any]) -> bytes:
    return bytes(entry["bytes"])


def _ids_by_bytes(house: House) -> dict[bytes, int]:
    """The toy's tokens by their bytes, from their texts alone: those that are whole characters."""
    vocabulary = range(house.station.node.target.vocab)
    texts = {token: house.tokenizer.decode([token]) for token in vocabulary}
    return {text.encode(): token for token, text in texts.items() if text and "\ufffd" not in text}


def test_a_chats_entries_are_true(house: House) -> None:
    """vllm#17876, lcpp#27972 over HTTP: `logprob` 0.0 and an empty list behind the first token.

    Every entry against a pass of the plain model over the prompt and what was written before.
    """
    (choice,) = house.answers(CHAT, temperature=0, logprobs=True, top_logprobs=TOP, max_tokens=18)
    entries = choice["logprobs"]["content"]
    prompt = house.tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_dict=False,
    )
    written = house.greedy(prompt, len(entries))
    with torch.inference_mode():
        rows = house.plain(input_ids=torch.tensor([prompt + written])).logits[0].log_softmax(-1)
    known = _ids_by_bytes(house)
    for row, token, entry in zip(rows[len(prompt) - 1 : -1], written, entries, strict=True):
        assert abs(entry["logprob"] - float(row[token])) < TOLERANCE
        assert len(entry["top_logprobs"]) == TOP
        best = row.topk(TOP)
        for other, value, named in zip(
            best.indices.tolist(), best.values.tolist(), entry["top_logprobs"], strict=True
        ):
            assert abs(named["logprob"] - value) < TOLERANCE
            assert known.get(_bytes(named), other) == other
        # The best is what was taken.
        assert _bytes(entry["top_logprobs"][0]) == _bytes(entry)
    data = b"".join(_bytes(entry) for entry in entries)
    assert data.decode().startswith(text_of(choice))


@pytest.mark.parametrize("temperature", [0, 0.9])
def test_a_stream_has_the_entries_of_the_whole_answer(house: House, temperature: float) -> None:
    """sgl#10660, #14046: streams in particular lost the entries of all but one token of a step."""
    for path, fields in (
        (CHAT, {"logprobs": True, "top_logprobs": 3}),
        (COMPLETIONS, {"logprobs": 3}),
    ):
        asked: dict[str, Any] = {"temperature": temperature, "ignore_eos": True, **fields}
        (choice,) = house.answers(path, **asked)
        whole = choice["logprobs"]
        events = [event["choices"][0] for event in house.stream(path, **asked)]
        parts = [event["logprobs"] for event in events if event["logprobs"] is not None]
        assert len(parts) == 12
        for name, entries in whole.items():
            if entries is not None:
                assert [entry for part in parts for entry in part[name]] == entries
        house.speculate(0)
        plain = house.ask(path, **asked)["choices"][0]["logprobs"]
        _assert_close(whole, plain)


@pytest.mark.parametrize("at", range(1, 2 * BLOCK))
def test_entries_end_where_the_answer_ends(house: House, at: int) -> None:
    """sgl#10660: one entry per token, also where a stop cuts a block."""
    house.speculate(LOOKAHEAD)
    prompt = house.tokenizer("How many rows")["input_ids"]
    written = house.greedy(prompt, 2 * BLOCK)
    end = written[at]
    answer = house.ask(
        COMPLETIONS,
        prompt=prompt,
        temperature=0,
        ignore_eos=True,
        max_tokens=50,
        stop_token_ids=[end],
        logprobs=2,
    )
    count = written.index(end) + 1
    logprobs = answer["choices"][0]["logprobs"]
    assert answer["usage"]["completion_tokens"] == count
    assert {len(entries) for entries in logprobs.values()} == {count}


def test_tokens_and_offsets_spell_the_answer(house: House) -> None:
    """sgl#10660 once more, by what the entries say: their tokens are the text, each at its place,
    and a stop string ends them where it ends the answer."""
    fields: dict[str, Any] = {"temperature": 0.9, "max_tokens": 14}
    # Special tokens have a name and no text.
    fields["logit_bias"] = {str(token): -100 for token in house.tokenizer.all_special_ids}
    (choice,) = house.answers(COMPLETIONS, logprobs=1, **fields)
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert "".join(tokens) == choice["text"]
    assert offsets == [len("".join(tokens[:at])) for at in range(14)]
    for start in range(1, 12):
        stop = choice["text"][start : start + 2]
        (cut,) = house.answers(COMPLETIONS, logprobs=1, stop=stop, **fields)
        said = cut["logprobs"]["tokens"]
        assert stop in "".join(said)
        assert stop not in "".join(said[:-1])
        assert said == tokens[: len(said)]
        assert cut["text"] == choice["text"][: choice["text"].index(stop)]


def test_completions_and_chats_ask_in_their_own_ways(house: House) -> None:
    """vllm#6967: `logprobs` without a number was a TypeError."""
    for path, fields in (
        (CHAT, {"logprobs": True}),
        (CHAT, {"logprobs": True, "top_logprobs": 0}),
        (COMPLETIONS, {"logprobs": 0}),
        (COMPLETIONS, {"logprobs": 1, "top_k": 1}),
    ):
        (choice,) = house.answers(path, **fields)
        found = choice["logprobs"]
        values = found["content"] if path == CHAT else found["token_logprobs"]
        assert 0 < len(values) <= 12
        if path == CHAT:
            values = [entry["logprob"] for entry in values]
        assert all(value <= 0 for value in values)
        assert any(value < -1e-6 for value in values)


def test_improbable_alternatives_are_numbers(house: House) -> None:
    """sgl#5984, #20323: at temperature 0.01 with top_p 0.3 the barred alternatives were minus
    infinity, and the answer a 500."""
    house.speculate(LOOKAHEAD)
    body = body_for(CHAT, temperature=0.01, top_p=0.3, logprobs=True, top_logprobs=20)
    body["logit_bias"] = {"9": -100}
    for stream in (False, True):
        response = house.station.post(CHAT, {**body, "stream": stream})
        assert response.status_code == 200
        lines = response.text.split("\n\n") if stream else [response.text]
        values = []
        for line in lines:
            data = line.removeprefix("data: ")
            if data and data != "[DONE]":
                for choice in _strict(data)["choices"]:
                    for entry in (choice["logprobs"] or {}).get("content", ()):
                        values += [one["logprob"] for one in entry["top_logprobs"]]
        assert len(values) == 20 * 12
        assert all(-9999 <= value <= 0 for value in values)


def test_log_probabilities_of_a_prompt_are_refused(house: House) -> None:
    """vllm#10234, #8047, #18908: echo with logprobs was a 500, prompt_logprobs a crash or a random
    first token. Nothing here computes them, and the refusal says so."""
    response = house.station.post(
        COMPLETIONS, body_for(COMPLETIONS, echo=True, logprobs=1, top_k=1)
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "echo"
    text = house.ask(COMPLETIONS, echo=True)["choices"][0]["text"]
    assert text == QUESTION + house.ask(COMPLETIONS)["choices"][0]["text"]
    for path in (CHAT, COMPLETIONS):
        response = house.station.post(path, body_for(path, prompt_logprobs=1))
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt_logprobs"
    # The engine goes on.
    house.ask(COMPLETIONS, logprobs=1)


def test_alternatives_that_print_alike_are_kept_apart(house: House) -> None:
    """vllm#6626: every token that is a piece of a character prints as U+FFFD, so that alternatives
    fell into one.

    The toy has a token for every byte; all twenty best are lifted to be bytes above 0x7f.
    """
    pieces = [
        token
        for token in range(house.station.node.target.vocab)
        if house.tokenizer.decode([token]) == "\ufffd"
    ]
    assert len(pieces) > 100
    fields: dict[str, Any] = {
        "temperature": 2,
        "top_p": 1,
        "seed": 3,
        "ignore_eos": True,
        "logit_bias": {str(token): 100 for token in pieces},
    }
    house.speculate(LOOKAHEAD)
    chat = house.ask(CHAT, **fields, logprobs=True, top_logprobs=20)["choices"][0]
    entries = chat["logprobs"]["content"]
    printed = [entry["token"] for entry in entries]
    assert len(entries) == 12
    assert printed.count("\ufffd") > 6
    for entry in entries:
        assert len({_bytes(one) for one in entry["top_logprobs"]}) == 20
    lists = house.ask(COMPLETIONS, **fields, logprobs=20)["choices"][0]["logprobs"]
    for alternatives in lists["top_logprobs"]:
        assert len(alternatives) in (20, 21)
