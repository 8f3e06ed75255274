"""The official client of OpenAI, unchanged, against a node."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest


@pytest.fixture
def client(station: Any) -> Iterator[openai.OpenAI]:
    with (
        openai.DefaultHttpxClient(trust_env=False) as http,
        openai.OpenAI(
            base_url=f"{station.url}/v1", api_key="key-of-acme", http_client=http, max_retries=0
        ) as client,
    ):
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    settings: dict[str, Any] = {"model": "tiny", "max_completion_tokens": 8, "seed": 3}
    messages: list[Any] = [{"role": "user", "content": "How many rows?"}]
    return client.chat.completions.create(messages=messages, **(settings | fields))


def test_chat(client: openai.OpenAI) -> None:
    answer = ask(client, metadata={"domain": "sql"}, store=True, safety_identifier="someone")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_streams_the_same_text(client: openai.OpenAI) -> None:
    chunks = list(ask(client, stream=True, stream_options={"include_usage": True}))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    whole = ask(client)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert chunks[0].choices[0].delta.role == "assistant"
    assert len({chunk.id for chunk in chunks}) == 1


def test_chat_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny", messages=[{"role": "user", "content": "How many rows?"}], seed=3, max_tokens=8
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == ask(client).choices[0].message.content


def test_completions(client: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": "tiny", "prompt": "How many", "max_tokens": 6, "seed": 1}
    answer = client.completions.create(**settings)
    text = "".join(c.choices[0].text for c in client.completions.create(stream=True, **settings))
    assert text == answer.choices[0].text


def test_extra_fields_of_other_servers(client: openai.OpenAI) -> None:
    answer = ask(client, extra_body={"top_k": 5, "min_p": 0.1, "ignore_eos": True})
    assert answer.usage.completion_tokens == 8


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "draftkeep"


def test_errors_have_the_types_the_client_knows(client: openai.OpenAI) -> None:
    with pytest.raises(openai.AuthenticationError) as denied:
        ask(client.with_options(api_key="wrong"))
    assert denied.value.code == "invalid_api_key"
    with pytest.raises(openai.BadRequestError) as refused:
        ask(client, n=2)
    assert refused.value.param == "n"
    with pytest.raises(openai.NotFoundError) as missing:
        ask(client, model="gpt")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt")


def test_a_stream_that_fails_raises(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr("draftkeep.serve.engine.target_pass", fail)
    with pytest.raises(openai.APIError, match="RuntimeError"):
        list(ask(client, stream=True))
