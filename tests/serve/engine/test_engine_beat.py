"""The engine says when its loop last came round, so that somebody else can tell that it hangs."""

import threading
from typing import Any

import pytest

from draftkeep.serve.engine import decode_step
from draftkeep.serve.engine.verification import target_pass
from draftkeep.serve.passes.runner import ModelRunner


def test_every_step_beats(lab: Any, clock: Any) -> None:
    engine = lab.engine(clock=clock)
    assert engine.beat_s == clock.now_s
    for _ in range(3):
        clock.now_s += 7.0
        assert engine.beat_s == clock.now_s - 7.0
        engine.step()
        assert engine.beat_s == clock.now_s


def test_it_beats_between_reading_a_prompt_and_decoding(
    lab: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill = ModelRunner.prefill
    beats: list[float] = []

    def reading(runner: ModelRunner, segments: Any) -> None:
        beats.append(engine.beat_s)
        clock.now_s += 5.0
        prefill(runner, segments)

    def decoding(runner: ModelRunner, rows: Any) -> Any:
        beats.append(engine.beat_s)
        return target_pass(runner, rows)

    engine = lab.engine(clock=clock)
    start_s = clock.now_s
    monkeypatch.setattr(ModelRunner, "prefill", reading)
    monkeypatch.setattr(decode_step, "target_pass", decoding)
    lab.run(engine, [lab.request("a", (1, 2, 3), max_tokens=1)])
    assert beats == [start_s, start_s + 5.0]


def test_it_stands_still_while_a_pass_hangs_and_goes_on_behind_it(
    lab: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, released, stop = threading.Event(), threading.Event(), threading.Event()

    def hangs(runner: ModelRunner, rows: Any) -> Any:
        hanging.set()
        assert released.wait(60)
        return target_pass(runner, rows)

    monkeypatch.setattr(decode_step, "target_pass", hangs)
    monkeypatch.setattr("draftkeep.serve.engine.engine._IDLE_WAIT_S", 0.001)
    engine = lab.engine(clock=clock)
    loop = threading.Thread(target=engine.run, args=(stop,), daemon=True)
    loop.start()
    reply = lab.request("a", (1, 2), max_tokens=1)
    engine.submit(reply.request)
    assert hanging.wait(60)
    started_s = clock.now_s
    clock.now_s += 1000.0
    assert engine.beat_s == started_s
    released.set()
    # An idle loop comes round as well.
    while engine.beat_s < clock.now_s:
        assert loop.is_alive()
    stop.set()
    loop.join(60)
    assert not loop.is_alive()
    assert len(reply.tokens) == 1
