"""Requests do not touch one another, and nothing a caller or a model does stops the engine."""

import threading
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from draftkeep.errors import ModelError, UnavailableError
from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine.drafting import DraftModel
from draftkeep.serve.engine.model_drafter import ModelDrafter
from draftkeep.serve.engine.ngram import NgramDrafter
from draftkeep.serve.engine.request import Finish, Finished

PROMPT = (3, 9, 4)


class Problems:
    """What an engine reported, and then an exception of its own."""

    def __init__(self) -> None:
        self.told: list[tuple[str, type]] = []

    def __call__(self, kind: str, error: BaseException) -> None:
        self.told.append((kind, type(error)))
        raise OSError("the log is full")


@pytest.fixture(scope="module")
def alone(lab: Any) -> Any:
    return lab.run(lab.engine(slots=1), [lab.request("a", PROMPT, max_tokens=20)])[0]


def test_a_cancelled_request_frees_its_slot_before_the_next_step(lab: Any) -> None:
    finished: list[Finished] = []
    engine = lab.engine(slots=1, on_finish=finished.append)
    first, second = lab.request("a", PROMPT, max_tokens=50), lab.request("b", PROMPT, max_tokens=2)
    engine.submit(first.request)
    engine.submit(second.request)
    engine.step()
    engine.cancel("a")
    engine.step()
    assert first.finish == Finish.CANCELLED
    assert len(second.tokens) == 1
    while engine.step():
        pass
    assert second.finish == Finish.LENGTH
    assert [f.request.request_id for f in finished] == ["b"]
    assert engine.stats().cancelled == 1


def test_a_waiting_request_can_be_cancelled(lab: Any) -> None:
    engine = lab.engine(slots=1)
    running, waiting = lab.request("a", PROMPT), lab.request("b", PROMPT)
    engine.submit(running.request)
    engine.submit(waiting.request)
    engine.step()
    engine.cancel("b")
    engine.cancel("unknown")
    lab.run(engine, [])
    assert waiting.finish == Finish.CANCELLED
    assert waiting.tokens == []
    assert running.finish == Finish.LENGTH


def test_many_cancellations_leave_nothing_behind(lab: Any, alone: Any) -> None:
    engine = lab.engine(slots=4, drafter="noisy", queue=400)
    for index in range(300):
        engine.submit(lab.request(str(index), PROMPT, max_tokens=50).request)
        engine.cancel(str(index))
        if index % 7 == 0:
            engine.step()
    last = lab.request("last", PROMPT, max_tokens=20)
    lab.run(engine, [last])
    lab.assert_same(last, alone)
    assert engine.stats().running == engine.stats().waiting == 0
    assert engine.stats().known == engine.stats().leaving == 0


def test_callbacks_that_raise_harm_their_own_request_alone(lab: Any, alone: Any) -> None:
    def broken(*_: Any) -> None:
        raise OSError("no space left on device")

    finished: list[str] = []

    def on_finish(result: Any) -> None:
        finished.append(result.request.request_id)
        broken()

    problems = Problems()
    engine = lab.engine(drafter="noisy", on_finish=on_finish, on_problem=problems)
    good, bad = lab.request("good", PROMPT, max_tokens=20), lab.request("bad", PROMPT)
    engine.submit(replace(bad.request, on_tokens=broken))
    lab.run(engine, [good])
    lab.assert_same(good, alone)
    assert finished == ["good"]
    assert engine.stats().callback_failed == 2
    assert problems.told == [("a callback", OSError)] * 2
    assert engine.stats().running == 0


def test_a_failing_target_pass_fails_what_is_in_flight_and_nothing_after(
    lab: Any, alone: Any, monkeypatch: Any
) -> None:
    problems = Problems()
    engine = lab.engine(drafter="noisy", on_problem=problems)
    lost = [lab.request(str(i), PROMPT, max_tokens=20) for i in range(3)]
    for reply in lost:
        engine.submit(reply.request)
    engine.step()
    lab.step_that_fails(engine, monkeypatch)
    assert all(isinstance(reply.error, ModelError) for reply in lost)
    assert all("repeat" in str(reply.error) for reply in lost)
    again = lab.request("again", PROMPT, max_tokens=20)
    lab.run(engine, [again])
    lab.assert_same(again, alone)
    assert engine.stats().failed == 3
    assert problems.told == [("a pass of the target", RuntimeError)]


def test_a_failing_drafter_costs_speed_alone(lab: Any, alone: Any, monkeypatch: Any) -> None:
    problems = Problems()
    engine = lab.engine(on_problem=problems)
    drafter = lab.drafter("copy")
    engine.swap(drafter)
    digest = drafter.digest
    reply = lab.request("a", PROMPT, max_tokens=20)
    engine.submit(reply.request)
    engine.step()

    def failing(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ModelDrafter, "propose", failing)
    lab.run(engine, [])
    lab.assert_same(reply, alone)
    assert engine.stats().drafter_failed == 1
    assert (engine.stats().drafter, engine.stats().drafter_lost) == (b"", digest)
    assert problems.told == [(f"drafter {digest.hex()[:12]}", RuntimeError)]
    engine.swap(lab.drafter("copy"))
    assert engine.stats().drafter_lost == b""
    engine.step()
    assert engine.stats().drafter == digest


def test_a_failing_floor_does_not_hide_which_drafter_was_lost(lab: Any, monkeypatch: Any) -> None:
    engine = lab.engine(floor=NgramDrafter(2, 1))
    drafter = lab.drafter("copy")
    engine.swap(drafter)
    reply = lab.request("a", (5, 6, 5, 6, 5), max_tokens=20)
    engine.submit(reply.request)
    engine.step()

    def failing(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(ModelDrafter, "propose", failing)
    monkeypatch.setattr(NgramDrafter, "propose", failing)
    lab.run(engine, [])
    assert engine.stats().drafter_failed == 2
    assert (engine.stats().drafter, engine.stats().drafter_lost) == (b"", drafter.digest)


def test_a_failing_capture_costs_the_capture_alone(lab: Any, alone: Any, monkeypatch: Any) -> None:
    finished: list[Finished] = []
    problems = Problems()
    engine = lab.engine(
        drafter="noisy", capture_k=4, on_finish=finished.append, on_problem=problems
    )

    def failing(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr("draftkeep.serve.engine.recorder.look_through", failing)
    reply = lab.request("a", PROMPT, max_tokens=20)
    lab.run(engine, [reply])
    lab.assert_same(reply, alone)
    assert finished[0].ids_TK.shape == (20, 0)
    assert engine.stats().capture_failed == 1
    assert problems.told[0] == ("capture", MemoryError)


def test_a_row_of_nan_fails_alone(lab: Any, alone: Any, monkeypatch: Any) -> None:
    engine = lab.engine()
    good, bad = lab.request("good", PROMPT, max_tokens=20), lab.request("bad", (1, 2))
    for reply in (good, bad):
        engine.submit(reply.request)
    engine.step()
    lab.step_with_nan(engine, monkeypatch, row=1)
    assert isinstance(bad.error, ModelError)
    lab.run(engine, [])
    lab.assert_same(good, alone)


def test_an_impossible_request_fails_alone(lab: Any, alone: Any) -> None:
    bias = tuple((token, float("-inf")) for token in range(48))
    engine = lab.engine(drafter="noisy")
    good = lab.request("good", PROMPT, max_tokens=20)
    bad = lab.request("bad", PROMPT, sampling=Sampling(logit_bias=bias))
    engine.submit(bad.request)
    lab.run(engine, [good])
    assert isinstance(bad.error, ModelError)
    lab.assert_same(good, alone)


@pytest.mark.parametrize("fault", ["outputs", "order", "range", "nan", "inputs"])
def test_a_drafter_that_does_not_fit_is_refused_and_the_old_one_stays(
    lab: Any, alone: Any, fault: Any
) -> None:
    engine = lab.engine(drafter="copy")
    engine.step()
    model = lab.drafter("random").model
    ids = torch.arange(48)
    if fault == "outputs":
        ids = ids[1:]
    elif fault == "order":
        ids = ids.flip(0)
    elif fault == "range":
        ids = ids + 1
    elif fault == "nan":
        with torch.no_grad():
            model.model.layers[1].mlp.up_proj.weight[0, 0] = torch.nan
    else:
        model = lab.drafter("random", vocab=20).model
        ids = torch.arange(20)
    with pytest.raises(ModelError):
        engine.swap(DraftModel(model=model, vocab_ids=ids, digest=b"bad"))
    reply = lab.request("a", PROMPT, max_tokens=20)
    lab.run(engine, [reply])
    lab.assert_same(reply, alone)
    assert engine.stats().drafter.startswith(b"copy")
    assert engine.stats().accepted == engine.stats().tested > 0


def test_threads_submit_cancel_and_swap_while_the_loop_runs(lab: Any, alone: Any) -> None:
    engine = lab.engine(slots=3, drafter="noisy", queue=100)
    stop, done = threading.Event(), threading.Semaphore(0)
    loop = threading.Thread(target=engine.run, args=(stop,))
    loop.start()
    replies = [lab.request(str(i), PROMPT, max_tokens=20) for i in range(12)]

    def on_tokens(reply: Any, emission: Any) -> None:
        reply.request.on_tokens(emission)
        if emission.finish is not None:
            done.release()

    for reply in replies:
        engine.submit(replace(reply.request, on_tokens=partial(on_tokens, reply)))
    engine.swap(lab.drafter("copy"))
    engine.cancel("11")
    for _ in replies:
        assert done.acquire(timeout=60)
    stop.set()
    loop.join(timeout=60)
    assert not loop.is_alive()
    for reply in replies[:11]:
        lab.assert_same(reply, alone)
    with pytest.raises(UnavailableError, match="another node"):
        engine.submit(lab.request("late", PROMPT).request)


def test_an_idle_engine_that_is_woken_sees_its_end(lab: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("draftkeep.serve.engine.engine._IDLE_WAIT_S", 3600.0)
    for _ in range(20):
        engine, stop = lab.engine(slots=1), threading.Event()
        loop = threading.Thread(target=engine.run, args=(stop,), daemon=True)
        loop.start()
        stop.set()
        engine.wake()
        loop.join(timeout=60)
        assert not loop.is_alive()


def test_close_fails_what_waits_and_what_runs(lab: Any) -> None:
    engine = lab.engine(slots=1)
    replies = [lab.request(str(i), PROMPT) for i in range(3)]
    for reply in replies:
        engine.submit(reply.request)
    engine.step()
    engine.close()
    assert all(isinstance(reply.error, UnavailableError) for reply in replies)
    assert engine.stats().running == engine.stats().waiting == 0
