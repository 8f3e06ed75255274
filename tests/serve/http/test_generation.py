"""What a request is charged for and leaves behind, however it ends."""

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from draftkeep.serve.engine.request import Emission
from draftkeep.serve.http import submitting
from draftkeep.serve.http.choice_text import ChoiceText
from draftkeep.serve.http.generation import Generation
from tests.serve.station import API_KEYS, bearer

BODY = {"model": "tiny", "prompt": "How many?", "max_tokens": 4, "n": 3}


@pytest.mark.parametrize("stops", [(), ("no such text",)])
def test_tokens_that_nobody_read_are_charged(station: Any, stops: tuple[str, ...]) -> None:
    charged: list[int] = []

    async def leave_early() -> None:
        generation = Generation(station.node.engine, on_close=charged.append)
        text = ChoiceText(station.node.target.tokenizer, stops=stops, min_tokens=0)
        choice = generation.add("early-0", text, None)
        choice.on_tokens(Emission(tokens=(5, 6), finish=None))
        choice.on_tokens(Emission(tokens=(7,), finish=None))
        generation.close(delivered=False)
        generation.close(delivered=True)

    asyncio.run(leave_early())
    assert charged == [3]


@pytest.mark.parametrize("broken", ["ChoiceText", "EngineRequest"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_request_that_fails_before_it_starts_leaves_nothing_pending(
    stations: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, broken: str, at: int
) -> None:
    station = stations()
    real, calls = getattr(submitting, broken), iter(range(10))

    def failing(*arguments: Any, **named: Any) -> Any:
        if next(calls) == at:
            raise MemoryError
        return real(*arguments, **named)

    monkeypatch.setattr(submitting, broken, failing)
    # Over a connection of its own: the server closes one on which it met the unexpected.
    url, headers = f"{station.url}/v1/completions", bearer(API_KEYS["acme"])
    assert httpx.post(url, json=BODY, headers=headers, trust_env=False).status_code == 500
    monkeypatch.undo()
    assert station.node.capture.pending == 0
    use = station.node.limits.usage()["acme"]
    assert (use["running"], use["tokens"]) == (0, 0)
    assert station.post("/v1/completions", BODY).status_code == 200
