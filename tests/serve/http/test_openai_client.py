"""The official client of OpenAI, unchanged, against a node."""

import asyncio
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

MESSAGES: list[Any] = [{"role": "user", "content": "How many rows?"}]
SETTINGS: dict[str, Any] = {"model": "tiny", "max_tokens": 8, "seed": 3}
FIELDS: list[dict[str, Any]] = [
    {},
    {"n": 3, "temperature": 0.7},
    {"stop": ["a", "e"], "n": 2},
    {"top_p": 0.9, "presence_penalty": 0.5, "frequency_penalty": -0.5, "logit_bias": {"70": -5}},
    {"extra_body": {"top_k": 5, "min_p": 0.1, "min_tokens": 4, "repetition_penalty": 1.1}},
    {"extra_body": {"stop_token_ids": [70, 71], "ignore_eos": True}},
]


def connect(station: Any, key: str = "key-of-acme") -> openai.OpenAI:
    return openai.OpenAI(
        base_url=f"{station.url}/v1",
        api_key=key,
        http_client=openai.DefaultHttpxClient(trust_env=False),
        max_retries=0,
    )


@pytest.fixture
def client(station: Any) -> Iterator[openai.OpenAI]:
    with connect(station) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    return client.chat.completions.create(messages=MESSAGES, **(SETTINGS | fields))


def complete(client: openai.OpenAI, **fields: Any) -> Any:
    return client.completions.create(**(SETTINGS | {"prompt": "How many"} | fields))


def texts(answer: Any) -> list[str]:
    return [
        choice.message.content if hasattr(choice, "message") else choice.text
        for choice in answer.choices
    ]


def streamed(chunks: list[Any], choices: int = 1) -> list[str]:
    """The text of every choice."""
    found = [""] * choices
    for chunk in chunks:
        for choice in chunk.choices:
            added = choice.delta.content if hasattr(choice, "delta") else choice.text
            found[choice.index] += added or ""
    return found


def check(model: Any, value: Any) -> None:
    """The client's own types hold strictly, and nothing is in the JSON that they do not name."""
    data = value.model_dump(exclude_unset=True)
    for choice in data["choices"]:
        # The type of a completion's chunk is that of a whole one, though OpenAI sends null, too.
        if model is Completion and choice["finish_reason"] is None:
            choice["finish_reason"] = "stop"
    made = model.model_validate(data, strict=True)

    def no_extras(part: Any) -> None:
        if isinstance(part, list):
            for item in part:
                no_extras(item)
        if hasattr(part, "model_fields_set"):
            known = {"obfuscation"} if model is Completion else set()
            assert set(part.model_extra or {}) <= known
            for name in part.model_fields_set:
                no_extras(getattr(part, name))

    no_extras(made)


@pytest.mark.parametrize("fields", FIELDS)
@pytest.mark.parametrize("route", [ask, complete])
def test_whole_and_streamed_answers_agree_and_have_the_clients_types(
    client: openai.OpenAI, route: Callable[..., Any], fields: dict[str, Any]
) -> None:
    whole = route(client, **fields)
    choices = fields.get("n", 1)
    check(ChatCompletion if route is ask else Completion, whole)
    assert [choice.index for choice in whole.choices] == list(range(choices))
    chunks = list(route(client, stream=True, stream_options={"include_usage": True}, **fields))
    for chunk in chunks:
        check(ChatCompletionChunk if route is ask else Completion, chunk)
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert {chunk.system_fingerprint for chunk in chunks} == {whole.system_fingerprint}
    assert streamed(chunks, choices) == texts(whole)
    assert [chunk.usage for chunk in chunks] == [None] * (len(chunks) - 1) + [whole.usage]
    ends = {
        choice.index: choice.finish_reason
        for chunk in chunks
        for choice in chunk.choices
        if choice.finish_reason
    }
    assert ends == {choice.index: choice.finish_reason for choice in whole.choices}


@pytest.mark.parametrize("route", [ask, complete])
def test_the_async_client(station: Any, client: openai.OpenAI, route: Callable[..., Any]) -> None:
    async def talk() -> tuple[Any, list[Any]]:
        async with openai.AsyncOpenAI(
            base_url=f"{station.url}/v1",
            api_key="key-of-acme",
            http_client=openai.DefaultAsyncHttpxClient(trust_env=False),
            max_retries=0,
        ) as client:
            whole, stream = await asyncio.gather(route(client), route(client, stream=True))
            return whole, [chunk async for chunk in stream]

    whole, chunks = asyncio.run(talk())
    assert texts(whole) == streamed(chunks) == texts(route(client))
    assert all("usage" not in chunk.model_fields_set for chunk in chunks)


def test_choices_differ_and_the_first_is_that_of_one_alone(client: openai.OpenAI) -> None:
    many = ask(client, n=4, temperature=1.5)
    assert len(set(texts(many))) > 1
    assert texts(ask(client, n=1, temperature=1.5)) == texts(many)[:1]
    assert texts(ask(client, n=4, temperature=1.5)) == texts(many)
    assert len(set(texts(ask(client, n=3, temperature=0)))) == 1


def test_a_batch_of_prompts_gives_what_each_gives_alone(client: openai.OpenAI) -> None:
    prompts = ["How many", "SELECT name", "Ada has 12"]
    batch = complete(client, prompt=prompts, n=2, temperature=0.9)
    alone = [complete(client, prompt=prompt, n=2, temperature=0.9) for prompt in prompts]
    assert texts(batch) == [text for answer in alone for text in texts(answer)]
    assert [choice.index for choice in batch.choices] == list(range(6))
    assert batch.usage.prompt_tokens == sum(answer.usage.prompt_tokens for answer in alone)
    assert batch.usage.completion_tokens == sum(a.usage.completion_tokens for a in alone)
    chunks = list(complete(client, prompt=prompts, n=2, temperature=0.9, stream=True))
    assert streamed(chunks, 6) == texts(batch)


def test_lists_of_ids_are_prompts(client: openai.OpenAI, station: Any) -> None:
    ids = station.node.target.tokenizer(["How many", "SELECT"])["input_ids"]
    assert texts(complete(client, prompt=ids)) == texts(
        complete(client, prompt=["How many", "SELECT"])
    )
    assert texts(complete(client, prompt=ids[0])) == texts(complete(client, prompt="How many"))


def test_echo_repeats_each_prompt(client: openai.OpenAI, station: Any) -> None:
    ids = station.node.target.tokenizer("SELECT naïve", add_special_tokens=False)["input_ids"]
    for prompt, text in (("How many", "How many"), (ids, "SELECT naïve")):
        plain = texts(complete(client, prompt=prompt, n=2))
        echoed = complete(client, prompt=prompt, n=2, echo=True)
        assert texts(echoed) == [text + answer for answer in plain]
        chunks = list(complete(client, prompt=prompt, n=2, echo=True, stream=True))
        assert streamed(chunks, 2) == texts(echoed)


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=MESSAGES, seed=3, max_tokens=8, n=2, logprobs=True
    ) as stream:
        final = stream.get_final_completion()
    whole = ask(client, n=2, logprobs=True)
    assert texts(final) == texts(whole)
    assert [choice.logprobs for choice in final.choices] == [
        choice.logprobs for choice in whole.choices
    ]


def test_harmless_fields_change_nothing(client: openai.OpenAI) -> None:
    harmless: dict[str, Any] = {
        "metadata": {"domain": "sql", "team": "x"},
        "store": True,
        "safety_identifier": "someone",
        "user": "someone",
        "service_tier": "default",
        "prompt_cache_key": "k",
        "parallel_tool_calls": False,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "none",
        "max_completion_tokens": 8,
    }
    assert texts(ask(client, **harmless)) == texts(ask(client))
    assert texts(complete(client, best_of=2, n=2, suffix=None)) == texts(complete(client, n=2))


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "draftkeep"


def test_errors_have_the_types_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as denied:
        ask(client.with_options(api_key="wrong"))
    assert denied.value.code == "invalid_api_key"
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, response_format={"type": "json_object"})
    assert (refused.value.param, refused.value.type) == (
        "response_format",
        "invalid_request_error",
    )
    with pytest.raises(openai.NotFoundError) as missing:
        ask(client, model="gpt")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")
    with pytest.raises(openai.APIStatusError) as large:
        complete(client, prompt="x" * 5_000_000)
    assert large.value.status_code == 413


def test_a_key_without_the_scope_and_a_tenant_at_its_limit(
    stations: Callable[..., Any],
) -> None:
    keys = [
        {"sha256": hashlib.sha256(b"chat-only").hexdigest(), "scopes": ["chat"]},
        {"sha256": hashlib.sha256(b"both").hexdigest()},
    ]
    station = stations(
        tenants=[{"name": "acme", "keys": keys, "limits": {"requests_per_minute": 2}}]
    )
    with connect(station, "chat-only") as client:
        with pytest.raises(openai.PermissionDeniedError):
            complete(client)
        # Neither refused requests nor answers that cost nothing count.
        ask(client)
        ask(client)
        with pytest.raises(openai.RateLimitError) as limited:
            ask(client)
    assert 1 <= int(limited.value.response.headers["retry-after"]) <= 60
    assert limited.value.type == "rate_limit_error"


def test_a_node_that_drains_is_an_internal_error_to_retry(stations: Callable[..., Any]) -> None:
    station = stations()
    station.node.drain()
    with connect(station) as client, pytest.raises(openai.InternalServerError) as away:
        ask(client)
    assert away.value.status_code == 503
    assert away.value.type == "service_unavailable_error"


def test_a_stream_that_fails_raises(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("draftkeep.serve.engine.decode_step.target_pass", fail)
    with pytest.raises(openai.APIError, match="RuntimeError"):
        list(ask(client, stream=True))


def test_an_answer_names_itself(client: openai.OpenAI) -> None:
    answer = ask(client)
    assert answer.id == f"chatcmpl-{answer._request_id}"
    raw = client.completions.with_raw_response.create(**SETTINGS, prompt="x")
    assert raw.parse().id == f"cmpl-{raw.request_id}"
