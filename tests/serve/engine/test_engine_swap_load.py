"""Drafters come and go every few milliseconds while requests run: no output notices."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from queue import Queue
from typing import Any

import pytest

from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine.request import Finished
from tests.faults.plain import plain_output

TOKENS = 90
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.9),
    Sampling(temperature=0.0, frequency_penalty=0.4),
    Sampling(temperature=0.8, top_p=0.9, presence_penalty=0.3),
    Sampling(temperature=1.2, top_k=12),
    Sampling(temperature=0.7, repetition_penalty=1.2),
)
CALLERS = 3
LEAST_ROUNDS, MOST_ROUNDS, SWAPPED_INSIDE = 2, 40, 4
BETWEEN_SWAPS_S = 0.003
# A run that hangs fails here; nothing is measured by it.
HANGS_S = 120.0


@contextmanager
def _running(engine: Any) -> Iterator[None]:
    stop = threading.Event()
    thread = threading.Thread(target=engine.run, args=(stop,))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        engine.wake()
        thread.join()


@contextmanager
def _swapping(lab: Any, engine: Any, failures: list[Exception]) -> Iterator[None]:
    """Drafters A, B and none in turn, each built anew, until the block ends."""
    stop = threading.Event()

    def swap() -> None:
        try:
            while not stop.is_set():
                for kind in ("noisy", "trimmed", "none"):
                    engine.swap(lab.drafter(kind))
                    stop.wait(BETWEEN_SWAPS_S)
        except Exception as error:
            failures.append(error)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _round(lab: Any, engine: Any, number: int, over: Queue[Any]) -> list[Any]:
    """One request of every sampling value, submitted from several threads; all waited for."""
    replies = []
    for index, prompt in enumerate(_prompts(lab)):
        reply = lab.request(
            f"{number}-{index}", prompt, max_tokens=TOKENS, sampling=SAMPLINGS[index], seed=index
        )
        reply.request = replace(reply.request, on_error=over.put)
        replies.append(reply)
    together = threading.Barrier(CALLERS)

    def call(share: list[Any]) -> None:
        together.wait(HANGS_S)
        for reply in share:
            engine.submit(reply.request)

    callers = [threading.Thread(target=call, args=(replies[at::CALLERS],)) for at in range(CALLERS)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    return replies


def _prompts(lab: Any) -> Any:
    return lab.prompts((3, 11, 1, 26, 8, 17))


@pytest.fixture(scope="module")
def alone(lab: Any) -> list[list[int]]:
    """What the plain model writes for each of them, one full pass a token."""
    return [
        plain_output(lab, prompt, sampling, tokens=TOKENS, seed=index)
        for index, (prompt, sampling) in enumerate(zip(_prompts(lab), SAMPLINGS, strict=True))
    ]


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_swaps_under_load_change_no_output(lab: Any, alone: Any, rule: str) -> None:
    """Rounds of requests until enough of them saw more than one drafter."""
    over: Queue[Any] = Queue()
    problems: list[Any] = []
    failures: list[Exception] = []
    engine = lab.engine(
        slots=4,
        lookahead=3,
        verification=rule,
        on_finish=over.put,
        on_problem=lambda kind, error: problems.append((kind, error)),
    )
    rounds: list[list[Any]] = []
    finished: list[Finished] = []
    with _running(engine), _swapping(lab, engine, failures):
        while len(rounds) < LEAST_ROUNDS or _swaps_inside(finished) < SWAPPED_INSIDE:
            assert len(rounds) < MOST_ROUNDS
            rounds.append(_round(lab, engine, len(rounds), over))
            for _ in SAMPLINGS:
                ended = over.get(timeout=HANGS_S)
                assert isinstance(ended, Finished), ended
                finished.append(ended)
    assert not problems
    assert not failures
    assert engine.stats().drafter_failed == 0
    assert engine.stats().accepted > 0
    for ended in finished:
        assert len(ended.output_ids_T) == TOKENS
        assert sum(use.positions for use in ended.drafters) == TOKENS
    for replies in rounds:
        for reply, expected in zip(replies, alone, strict=True):
            assert len(reply.tokens) == TOKENS
            if rule == "coupled" or reply.request.sampling.greedy:
                lab.assert_same(reply, expected)


def _swaps_inside(finished: list[Finished]) -> int:
    """Changes of drafter in the middle of requests, counted where the digests differ."""
    return sum(len({use.digest for use in ended.drafters}) - 1 for ended in finished)
