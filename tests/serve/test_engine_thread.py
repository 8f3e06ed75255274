"""The engine's thread: when it counts as alive, what is said of a stall, and how it ends."""

import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from draftkeep.serve.engine.engine import Engine
from draftkeep.serve.engine_thread import EngineThread
from tests.clock import Clock

STALL_S = 60.0


@pytest.fixture
def engine(lab: Any, clock: Clock) -> Engine:
    """An engine whose time stands still."""
    engine: Engine = lab.engine(clock=clock)
    return engine


@pytest.fixture
def later() -> Clock:
    """The watcher's clock, which a test can put ahead of the engine's."""
    return Clock()


@pytest.fixture
def thread(engine: Engine, later: Clock) -> Iterator[EngineThread]:
    thread = EngineThread(engine, stall_s=STALL_S, clock=later)
    thread.start()
    yield thread
    thread.stop()
    assert thread.join(60)


def test_a_loop_that_does_not_come_round_is_stalled_until_it_does(
    thread: EngineThread, later: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert thread.alive
        later.now_s += STALL_S
        assert thread.alive
        later.now_s += 1.0
        assert [thread.alive for _ in range(3)] == [False] * 3
        later.now_s -= STALL_S
        assert [thread.alive for _ in range(3)] == [True] * 3
    said = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in said] == ["CRITICAL", "WARNING"]
    assert "61.0 s" in said[0][1]
    assert "recovered" in said[1][1]
    assert not thread.stopping


def test_nothing_is_a_stall_where_that_is_switched_off(engine: Engine, later: Clock) -> None:
    thread = EngineThread(engine, stall_s=0.0, clock=later)
    later.now_s += 1e9
    assert not thread.alive
    thread.start()
    assert thread.alive
    thread.stop()
    assert thread.join(60)
    assert not thread.alive


def test_an_engine_that_raises_is_dead_and_says_so(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def die() -> bool:
        raise RuntimeError("zebra-canary-77")

    monkeypatch.setattr(engine, "step", die)
    thread = EngineThread(engine, stall_s=STALL_S)
    thread.start()
    assert thread.join(60)
    assert not thread.alive
    assert thread.stopping
    assert caplog.messages == ["the engine died with RuntimeError; restart the node"]


def test_a_join_that_takes_too_long_is_given_up(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go = threading.Event(), threading.Event()

    def hang() -> bool:
        begun.set()
        go.wait()
        return False

    monkeypatch.setattr(engine, "step", hang)
    thread = EngineThread(engine, stall_s=STALL_S)
    thread.start()
    assert begun.wait(60)
    thread.stop()
    assert not thread.join(0.01)
    go.set()
    assert thread.join(60)
