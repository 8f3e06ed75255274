"""A client that leaves frees its slot within a step, and what it never got is not kept."""

import json
import socket
from collections.abc import Callable
from typing import Any

import pytest


def send(station: Any, *, stream: bool, max_tokens: int = 200, **fields: Any) -> socket.socket:
    """A request over a bare socket, which the test can close when it likes."""
    body = json.dumps(
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "How many rows?"}],
            "stream": stream,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            **fields,
        }
    )
    connection = socket.create_connection(("127.0.0.1", int(station.url.rsplit(":", 1)[1])))
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer key-of-acme\r\n"
        b"Content-Type: application/json\r\n"
        + f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request_within_a_step(
    stations: Callable[..., Any], gate: Any, stream: bool
) -> None:
    station = stations()
    engine = station.node.engine
    connection = send(station, stream=stream)
    gate.allow(3)
    station.wait_for(lambda: engine.stats().output_tokens == 3)
    assert gate.waiting.wait(60)  # within the fourth pass
    connection.close()
    station.wait_for(lambda: engine.stats().leaving)
    gate.allow(1)
    station.wait_for(lambda: engine.stats().cancelled == 1)
    stats = engine.stats()
    assert (stats.output_tokens, stats.running, stats.waiting) == (4, 0, 0)
    assert station.capture_stats() == {
        "acknowledged": 0,
        "declined": {},
        "drops": {"client_gone": 1},
        "pending": 0,
        "cut": 0,
    }
    assert station.captured() == []


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_while_it_waits_is_never_started(
    stations: Callable[..., Any], gate: Any, stream: bool
) -> None:
    station = stations(serve={"slots": 1})
    engine = station.node.engine
    running = send(station, stream=True, max_tokens=2)
    assert gate.waiting.wait(60)
    waiting = send(station, stream=stream)
    station.wait_for(lambda: engine.stats().waiting == 1)
    waiting.close()
    station.wait_for(lambda: engine.stats().leaving)
    gate.open()
    station.wait_for(lambda: engine.stats().finished == 1)
    stats = station.capture_stats()
    running.close()
    assert engine.stats().cancelled == 1
    assert engine.stats().output_tokens == 2
    assert (stats["acknowledged"], stats["drops"]) == (1, {"client_gone": 1})


def test_many_clients_that_leave_cost_nothing(stations: Callable[..., Any]) -> None:
    station = stations()
    engine = station.node.engine
    for number in range(60):
        connection = send(station, stream=number % 2 == 0)
        if number % 4 == 0:
            connection.recv(64)
        connection.close()
    station.chat(max_tokens=3)
    # The last of them may be read only now.
    station.wait_for(lambda: engine.stats().finished + engine.stats().cancelled == 60 + 1)
    stats = station.capture_stats()
    assert stats["acknowledged"] + stats["drops"].get("client_gone", 0) == 60 + 1
    after = engine.stats()
    assert (after.known, after.running, after.waiting) == (0, 0, 0)


def test_a_finished_answer_is_not_cancelled(station: Any) -> None:
    engine = station.node.engine
    before = engine.stats()
    station.chat(max_tokens=3)
    body = {"model": "tiny", "prompt": "x", "max_tokens": 3, "stream": True}
    station.stream("/v1/completions", body)
    station.wait_for(lambda: engine.stats().finished == before.finished + 2)
    assert engine.stats().cancelled == before.cancelled
    assert engine.stats().leaving == 0


@pytest.mark.parametrize("stop", [[], ["never there"]])
@pytest.mark.parametrize("stream", [True, False])
def test_every_choice_of_a_client_that_leaves_ends_within_a_step(
    stations: Callable[..., Any], gate: Any, stream: bool, stop: list[str]
) -> None:
    station = stations(serve={"slots": 2})
    engine = station.node.engine
    connection = send(station, stream=stream, n=5, stop=stop)
    # The first pass may begin before the last choice has come.
    station.wait_for(lambda: engine.stats().known == 5)
    gate.allow(2)
    station.wait_for(lambda: engine.stats().steps == 2)
    assert gate.waiting.wait(60)
    # Two run, three wait, and none has been answered.
    before = engine.stats()
    assert (before.running, before.waiting) == (2, 3)
    connection.close()
    station.wait_for(lambda: engine.stats().leaving == 5)
    gate.allow(1)
    station.wait_for(lambda: engine.stats().cancelled == 5)
    stats = engine.stats()
    assert stats.output_tokens == before.output_tokens + 2
    assert (stats.running, stats.waiting) == (0, 0)
    assert station.capture_stats()["drops"] == {"client_gone": 5}
    assert station.node.limits.usage()["acme"]["running"] == 0


def test_choices_that_were_done_when_the_client_left_are_not_kept(
    stations: Callable[..., Any], gate: Any
) -> None:
    station = stations(serve={"slots": 1})
    engine = station.node.engine
    connection = send(station, stream=True, n=2, max_tokens=3)
    gate.allow(4)
    station.wait_for(lambda: engine.stats().finished == 1 and engine.stats().output_tokens == 4)
    assert gate.waiting.wait(60)
    connection.close()
    # Only the one that still runs is cancelled.
    station.wait_for(lambda: engine.stats().leaving == 1)
    gate.open()
    station.wait_for(lambda: engine.stats().cancelled == 1)
    assert station.capture_stats()["drops"] == {"client_gone": 2}
    assert station.captured() == []


def test_a_request_that_does_not_fit_the_queue_leaves_nothing_there(
    stations: Callable[..., Any], gate: Any
) -> None:
    station = stations(serve={"slots": 1, "queue": 2})
    running = send(station, stream=True, max_tokens=2)
    assert gate.waiting.wait(60)
    body = {"model": "tiny", "prompt": "x", "n": 3, "max_tokens": 1}
    refused = station.post("/v1/completions", body)
    assert refused.status_code == 429
    # Only the first request holds anything, and nothing is charged for the refused one.
    usage = station.node.limits.usage()["acme"]
    assert (usage["running"], usage["tokens"]) == (1, 0)
    gate.open()
    station.wait_for(lambda: station.node.engine.stats().finished == 1)
    station.wait_for(lambda: station.node.engine.stats().cancelled == 2)
    running.close()
    assert station.capture_stats()["drops"]["request_failed"] == 3
    assert station.node.limits.usage()["acme"]["running"] == 0
