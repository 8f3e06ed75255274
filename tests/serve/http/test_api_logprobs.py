"""Log-probabilities over HTTP: the target's own, one entry a token, cut where the answer is."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from draftkeep.serve.engine.drafting import DraftModel
from draftkeep.store.models.target import TargetModel

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT = "How many rows"


@pytest.fixture(scope="module", params=["none", "twin"])
def node(request: pytest.FixtureRequest, station: Any, tiny: TargetModel) -> Iterator[Any]:
    """The same node without a drafter, and with one whose blocks are accepted."""
    if request.param == "twin":
        station.node.engine.swap(
            DraftModel(
                model=copy.deepcopy(tiny.model),
                vocab_ids=torch.arange(tiny.vocab),
                digest=bytes(32),
            )
        )
    yield station
    station.node.engine.swap(None)


def chat(**fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": PROMPT}]
    settings = {"model": "tiny", "messages": messages, "seed": 5, "max_tokens": 16}
    return settings | {"logprobs": True} | fields


def completion(**fields: Any) -> dict[str, Any]:
    settings = {"model": "tiny", "prompt": PROMPT, "seed": 5, "max_tokens": 16, "ignore_eos": True}
    return settings | {"logprobs": 0} | fields


def teacher(tiny: TargetModel, prompt: list[int], output: list[int]) -> torch.Tensor:
    """The target's raw log-probabilities for every output position, by one fresh pass."""
    with torch.inference_mode():
        ids = torch.tensor([prompt + output])
        logits = tiny.model(input_ids=ids, use_cache=False).logits[0]
    rows: torch.Tensor = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return rows


def spelt(tiny: TargetModel, entry: dict[str, Any]) -> int:
    """The id of a chat entry, by its text; the toy's whole-character tokens are distinct."""
    ids: list[int] = tiny.tokenizer(entry["token"], add_special_tokens=False)["input_ids"]
    assert len(ids) == 1, "the test needs an answer of whole characters"
    return ids[0]


@pytest.mark.parametrize("sampled", [{"temperature": 0.3, "top_p": 0.9}, {"temperature": 0}])
def test_values_are_the_targets_before_every_processor(
    node: Any, tiny: TargetModel, sampled: dict[str, float]
) -> None:
    answer = node.post(CHAT, chat(top_logprobs=5, logit_bias={"70": 3}, **sampled)).json()
    (choice,) = answer["choices"]
    entries = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    assert len(entries) == answer["usage"]["completion_tokens"]
    output = [spelt(tiny, entry) for entry in entries]
    prompt = tiny.tokenizer.apply_chat_template(
        [{"role": "user", "content": PROMPT}], add_generation_prompt=True, return_dict=False
    )
    rows = teacher(tiny, prompt, output)
    for row, token, entry in zip(rows, output, entries, strict=True):
        assert entry["logprob"] == pytest.approx(float(row[token]), abs=2e-4)
        assert bytes(entry["bytes"]).decode() == entry["token"]
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == pytest.approx(row.topk(5).values.tolist(), abs=2e-4)
        assert values == sorted(values, reverse=True)


def test_the_two_forms_and_a_stream_say_the_same(node: Any) -> None:
    whole = node.post(COMPLETIONS, completion(logprobs=3)).json()["choices"][0]
    lists = whole["logprobs"]
    assert {len(values) for values in lists.values()} == {16}
    for at, (token, value) in enumerate(zip(lists["tokens"], lists["token_logprobs"], strict=True)):
        assert lists["top_logprobs"][at][token] == value
        assert len(lists["top_logprobs"][at]) in (3, 4)
        assert whole["text"].startswith(token, lists["text_offset"][at])
    *events, end = node.stream(COMPLETIONS, completion(logprobs=3, stream=True))
    assert end["choices"][0]["logprobs"] is None
    for name, values in lists.items():
        parts = [event["choices"][0]["logprobs"][name] for event in events]
        assert all(len(part) == 1 for part in parts)
        assert [part[0] for part in parts] == values


def test_a_chat_stream_carries_one_entry_a_token(node: Any) -> None:
    whole = node.post(CHAT, chat(top_logprobs=2, n=2)).json()["choices"]
    events = node.stream(CHAT, chat(top_logprobs=2, n=2, stream=True))
    for choice in whole:
        mine = [e["choices"][0] for e in events if e["choices"][0]["index"] == choice["index"]]
        first, *tokens, last = mine
        assert first["logprobs"] is last["logprobs"] is None
        entries = [token["logprobs"]["content"] for token in tokens]
        assert all(len(entry) == 1 for entry in entries)
        assert [entry[0] for entry in entries] == choice["logprobs"]["content"]


def test_asking_changes_no_token_and_needs_no_capture(node: Any) -> None:
    asked = node.post(COMPLETIONS, completion(logprobs=20, store=False)).json()
    plain = node.post(COMPLETIONS, completion(logprobs=None)).json()
    assert asked["choices"][0]["text"] == plain["choices"][0]["text"]
    assert plain["choices"][0]["logprobs"] is None
    assert len(asked["choices"][0]["logprobs"]["top_logprobs"][0]) >= 15


def test_logprobs_end_with_the_token_that_completes_a_stop(node: Any) -> None:
    plain = node.post(COMPLETIONS, completion()).json()["choices"][0]
    stop = plain["text"][8:10]
    answer = node.post(COMPLETIONS, completion(stop=stop)).json()
    (choice,) = answer["choices"]
    tokens = choice["logprobs"]["tokens"]
    assert len(tokens) == answer["usage"]["completion_tokens"]
    assert tokens == plain["logprobs"]["tokens"][: len(tokens)]
    joined = "".join(tokens)
    assert joined[: joined.find(stop)] == choice["text"]


def test_parts_of_a_character_have_their_own_bytes(node: Any, tiny: TargetModel) -> None:
    euro = tiny.tokenizer("€", add_special_tokens=False)["input_ids"]
    assert len(euro) == 3
    # One byte after another is all that is allowed, so the bytes come in some order.
    bias = {str(token): 100 for token in euro}
    answer = node.post(
        COMPLETIONS, completion(logit_bias=bias, logprobs=2, frequency_penalty=2, temperature=0)
    ).json()
    tokens = answer["choices"][0]["logprobs"]["tokens"]
    assert set(tokens) == {f"bytes:\\x{byte:02x}" for byte in "€".encode()}
    entries = node.post(CHAT, chat(logit_bias=bias, temperature=0)).json()["choices"][0]["logprobs"]
    assert all(len(entry["bytes"]) == 1 for entry in entries["content"])


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1},
        {"temperature": 0.01, "top_p": 0.3},
        {"min_p": 1.0},
        {"logit_bias": {str(token): -100 for token in range(3, 400)}},
    ],
)
def test_what_the_processors_rule_out_is_still_finite(node: Any, fields: dict[str, Any]) -> None:
    response = node.post(COMPLETIONS, completion(logprobs=20, **fields))
    assert response.status_code == 200
    assert "Infinity" not in response.text
    assert "NaN" not in response.text
    lists = response.json()["choices"][0]["logprobs"]
    assert all(-9999 <= value <= 0 for value in lists["token_logprobs"])
