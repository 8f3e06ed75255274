"""Errands: the event loop gets the answer, and its end waits for nobody."""

import asyncio
import threading

import pytest

from draftkeep.errors import StoreError
from draftkeep.serve.errands import Errands


def test_what_a_call_returns_and_raises_is_what_its_caller_gets() -> None:
    errands = Errands()
    assert asyncio.run(errands.run(lambda: threading.current_thread().name)) == "errand"

    def fail() -> None:
        raise StoreError("no")

    with pytest.raises(StoreError, match="no"):
        asyncio.run(errands.run(fail))
    assert errands.join(60)


def test_a_call_outlives_a_caller_that_is_cancelled_and_the_event_loop() -> None:
    errands, begun, go, ended = Errands(), threading.Event(), threading.Event(), threading.Event()

    def call() -> None:
        begun.set()
        go.wait()
        ended.set()

    async def cancelled() -> None:
        task = asyncio.create_task(errands.run(call))
        while not begun.is_set():
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert not errands.join(0)
    go.set()
    assert errands.join(60)
    assert ended.is_set()
