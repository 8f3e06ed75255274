"""Class J: a request that nobody waits for any more is gone, all of it, and the engine goes on."""

import gc
import json
import socket
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine.request import Finish, Finished, StepReport
from draftkeep.serve.passes.runner import ModelRunner
from tests.faults.plain import plain_output

GREEDY = Sampling(temperature=0.0)
CONTEXT = 64


def test_two_thousand_aborts_leave_nothing(lab: Any) -> None:
    """InternLM/lmdeploy#1788, sgl#2238: some hundreds of aborted streams stalled the engine, and
    their memory was not freed.

    Aborted while waiting, while their prompt is read, and after one to nine steps. No object of any
    of them survives, every slot is free, and the next answer is what it always was.
    """
    prompt = lab.prompts([40])[0]
    expected = plain_output(lab, prompt, GREEDY, tokens=8)
    engine = lab.engine(slots=4, drafter="noisy", lookahead=3, queue=2000, capture_k=4)
    alive = []
    for number in range(2000):
        reply = lab.request(str(number), prompt[: 1 + number % 40], max_tokens=50, top_logprobs=2)
        alive.append(weakref.ref(reply))
        engine.submit(reply.request)
        for _ in range(number // 20 % 10 if number % 20 == 0 else 0):
            engine.step()
        engine.cancel(str(number))
        del reply
        if number % 100 == 0:
            engine.step()
    while engine.step():
        pass
    stats = engine.stats()
    assert (stats.cancelled, stats.running, stats.waiting) == (2000, 0, 0)
    assert stats.kv_used_share == 0
    assert stats.output_tokens > 200
    last = lab.request("last", prompt, max_tokens=8)
    lab.run(engine, [last])
    lab.assert_same(last, expected)
    gc.collect()
    assert sum(reference() is not None for reference in alive) == 0
    assert (engine.stats().known, engine.stats().running) == (0, 0)


def test_an_abort_of_what_has_finished_is_nothing(lab: Any) -> None:
    """ROCm/ATOM#1589: an abort for every finished request, 58,455 of them, and none for a client
    that really left. A late one finds nothing, also where the id is in use again."""
    finished: list[Finished] = []
    engine = lab.engine(slots=2, drafter="copy", on_finish=finished.append)
    first = lab.request("a", (1, 2), max_tokens=5)
    lab.run(engine, [first])
    engine.cancel("a")
    engine.step()
    second = lab.request("a", (1, 2), max_tokens=5)
    lab.run(engine, [second])
    engine.cancel("a")
    engine.cancel("never")
    engine.step()
    assert first.tokens == second.tokens
    assert (first.finish, second.finish) == (Finish.LENGTH, Finish.LENGTH)
    assert (len(finished), engine.stats().cancelled) == (2, 0)


@pytest.mark.parametrize("after", range(6))
def test_an_abort_inside_any_step_takes_no_neighbour_along(lab: Any, after: int) -> None:
    """vllm#14326, sgl#36475: what goes on after an abort is the others, and only they."""
    prompts = lab.prompts((5, 9, 2))
    finished: list[Finished] = []
    engine = lab.engine(slots=3, drafter="noisy", lookahead=3, on_finish=finished.append)
    replies = [lab.request(str(i), p, max_tokens=18) for i, p in enumerate(prompts)]
    for reply in replies:
        engine.submit(reply.request)
    for _ in range(after):
        engine.step()
    engine.cancel("1")
    lab.run(engine, [])
    for index in (0, 2):
        lab.assert_same(replies[index], plain_output(lab, prompts[index], GREEDY, tokens=18))
    assert replies[1].finish == Finish.CANCELLED
    assert {one.request.request_id for one in finished} == {"0", "2"}


def test_every_slot_has_the_whole_context(lab: Any) -> None:
    """lemonade-sdk/lemonade#3276: the context was promised to each slot and held by all together,
    and 500s looked like timeouts."""
    prompts = lab.prompts((30, 1, 50, 63, 17))
    engine = lab.engine(slots=5, drafter="copy", lookahead=5, max_context=CONTEXT)
    replies = [lab.request(str(i), p, max_tokens=1000) for i, p in enumerate(prompts)]
    lab.run(engine, replies)
    for reply, prompt in zip(replies, prompts, strict=True):
        assert reply.finish == Finish.LENGTH
        assert len(prompt) + len(reply.tokens) == CONTEXT
        expected = plain_output(lab, prompt, GREEDY, tokens=CONTEXT - len(prompt))
        lab.assert_same(reply, expected)


@pytest.mark.parametrize("drafter", ["copy", "noisy", "none"])
def test_ten_rounds_cost_the_same(lab: Any, drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """lcpp#10860: with several slots every round was slower than the one before.

    Counted in passes, their widths and the tokens in them, which is what a round costs.
    """
    widths: list[list[tuple[int, int]]] = []

    def on_step(report: StepReport) -> None:
        widths[-1].append((report.width, len(report.rows)))

    engine = lab.engine(slots=3, drafter=drafter, lookahead=3, on_step=on_step)
    prompts = lab.prompts((4, 20, 9, 1, 7))
    fed: list[int] = []
    real = ModelRunner.forward

    def forward(runner: ModelRunner, segments: Any) -> Any:
        fed[-1] += sum(len(segment.tokens) for segment in segments)
        return real(runner, segments)

    engine.step()  # A drafter is taken up here, and measured.
    monkeypatch.setattr(ModelRunner, "forward", forward)
    for number in range(10):
        widths.append([])
        fed.append(0)
        lab.run(
            engine,
            [lab.request(f"{number}-{i}", p, max_tokens=12) for i, p in enumerate(prompts)],
        )
    assert all(one == widths[0] for one in widths)
    assert len(set(fed)) == 1
    assert fed[0] > 0


def _connect(station: Any, body: dict[str, Any]) -> socket.socket:
    """Send a request over a bare socket, which the test can close when it likes."""
    data = json.dumps(body).encode()
    connection = socket.create_connection(("127.0.0.1", int(station.url.rsplit(":", 1)[1])))
    connection.sendall(
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n"
        b"Authorization: Bearer key-of-acme\r\nContent-Type: application/json\r\n"
        + f"Content-Length: {len(data)}\r\n\r\n".encode()
        + data
    )
    return connection


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("slots", [4, 2])
def test_a_client_of_three_choices_that_leaves_ends_all_three(
    stations: Callable[..., Any], gate: Any, slots: int, stream: bool
) -> None:
    """vllm#14326, sgl#36475: the children of an aborted stream ran on and were kept.

    With two slots the third choice waits while the client leaves.
    """
    station = stations(serve={"slots": slots})
    engine = station.node.engine
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "How many rows?"}],
        "stream": stream,
        "n": 3,
        "max_tokens": 200,
        "ignore_eos": True,
    }
    connection = _connect(station, body)
    station.wait_for(lambda: engine.stats().known == 3)
    gate.allow(2)
    station.wait_for(lambda: engine.stats().steps == 2)
    assert gate.waiting.wait(60)  # within the third pass
    connection.close()
    station.wait_for(lambda: engine.stats().leaving == 3)
    gate.open()
    station.wait_for(lambda: engine.stats().cancelled == 3)
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.finished, stats.known) == (0, 0, 0, 0)
    assert station.capture_stats()["drops"] == {"client_gone": 3}
    assert station.captured() == []
    assert station.chat(max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3


def test_choices_that_do_not_all_fit_are_none_and_the_line_is_free_again(
    stations: Callable[..., Any], gate: Any
) -> None:
    """lemonade-sdk/lemonade#3276, vllm#14326: too much at once is a 429 that says when to come
    back, and nothing of it stays behind."""
    station = stations(serve={"slots": 1, "queue": 2})
    engine = station.node.engine
    connection = _connect(
        station,
        {
            "model": "tiny",
            "messages": [{"role": "user", "content": "How many rows?"}],
            "max_tokens": 2,
            "min_tokens": 2,
            "stream": True,
        },
    )
    assert gate.waiting.wait(60)
    response = station.post(
        "/v1/completions", {"model": "tiny", "prompt": "x", "n": 3, "max_tokens": 4}
    )
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    gate.open()
    station.wait_for(lambda: engine.stats().finished + engine.stats().cancelled == 3)
    stats = engine.stats()
    assert (stats.finished, stats.cancelled, stats.failed) == (1, 2, 0)
    assert (stats.output_tokens, stats.running, stats.waiting) == (2, 0, 0)
    assert stats.known == 0
    connection.close()
    assert station.chat(max_tokens=3, ignore_eos=True)["usage"]["completion_tokens"] == 3
