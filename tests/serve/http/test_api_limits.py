"""What a request over its tenant's limits costs the node: nothing of its prompt is read."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftkeep.config import LimitsConfig
from draftkeep.serve.http.prompting import fewest_tokens
from draftkeep.serve.limits import Limits
from tests.clock import Clock
from tests.serve.station import API_KEYS, bearer, sha256

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "How many?"}]},
    COMPLETIONS: {"prompt": "How many?"},
}


class CountingTokenizer:
    """A tokenizer that counts the prompts it was given."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.prompts = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.prompts += 1
        return self._tokenizer(*arguments, **named)

    def apply_chat_template(self, *arguments: Any, **named: Any) -> Any:
        self.prompts += 1
        return self._tokenizer.apply_chat_template(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)


def limited(
    stations: Callable[..., Any], clock: Clock, **limits: int
) -> tuple[Any, CountingTokenizer]:
    """A station whose only tenant has these limits, and its tokenizer."""
    tenant = {"name": "acme", "api_key_sha256": sha256(API_KEYS["acme"])}
    station = stations(tenants=[tenant])
    station.node.limits = Limits({"acme": LimitsConfig(**limits)}, clock=clock)
    tokenizer = CountingTokenizer(station.node.target.tokenizer)
    station.node.target = replace(station.node.target, tokenizer=tokenizer)
    return station, tokenizer


def ask(station: Any, path: str, **fields: Any) -> Any:
    settings = {"model": "tiny", "max_tokens": 4, "ignore_eos": True, **BODIES[path]}
    return station.post(path, settings | fields)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("limits", [{"requests_per_minute": 1}, {"tokens_per_minute": 100}])
def test_a_prompt_over_a_rate_is_not_read(
    stations: Callable[..., Any], path: str, limits: dict[str, int]
) -> None:
    clock = Clock()
    station, tokenizer = limited(stations, clock, **limits)
    station.node.limits.enter("acme", choices=1, tokens=100)
    response = ask(station, path)
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert tokenizer.prompts == 0
    clock.now_s += 60
    assert ask(station, path).status_code == 200
    assert tokenizer.prompts > 0


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_prompt_without_a_place_is_not_read(
    stations: Callable[..., Any], gate: Any, path: str
) -> None:
    station, tokenizer = limited(stations, Clock(), concurrent=2)
    running = threading.Thread(target=ask, args=(station, path))
    running.start()
    assert gate.waiting.wait(60)
    read = tokenizer.prompts
    assert ask(station, path, n=2).status_code == 429
    refused = ask(station, path, n=3)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "n")
    assert tokenizer.prompts == read
    gate.open()
    running.join()
    assert station.node.limits.usage()["acme"]["refused"] == 2
    assert ask(station, path, n=2).status_code == 200


def test_a_key_is_checked_without_a_thread(station: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads may all be busy with long prompts."""

    def busy(*_: Any) -> None:
        raise RuntimeError("no thread is free")

    monkeypatch.setattr("fastapi.dependencies.utils.run_in_threadpool", busy)
    headers = bearer(API_KEYS["acme"])
    assert station.http.get("/v1/models", headers=headers).status_code == 200
    assert station.http.get("/v1/models", headers=bearer("wrong")).status_code == 401


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_long_answer_is_told_how_long_to_wait_before_its_prompt_is_read(
    stations: Callable[..., Any], path: str
) -> None:
    """A wait for a single token would send the client back far too early."""
    station, tokenizer = limited(stations, Clock(), tokens_per_minute=600)
    station.node.limits.enter("acme", choices=1, tokens=600)
    response = ask(station, path, max_tokens=99)
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) == 10
    assert tokenizer.prompts == 0


@given(
    max_context=st.integers(2, 40),
    choices=st.integers(1, 5),
    bound=st.none() | st.integers(1, 50),
    data=st.data(),
)
def test_no_prompt_is_counted_as_fewer_tokens_than_the_first_look_asks_for(
    max_context: int, choices: int, bound: int | None, data: st.DataObject
) -> None:
    fewest = fewest_tokens(choices, bound, max_context=max_context)
    prompt = data.draw(st.integers(1, max_context - 1))
    room = max_context - prompt
    # Without a bound of the client's the tenant's limit may leave each answer one token.
    cap = 1 if bound is None else min(bound, room)
    assert fewest <= prompt + choices * cap
