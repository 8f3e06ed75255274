"""Where slots run out requests take turns, and no output shows that it was interrupted."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from draftkeep.errors import BusyError, ModelError, UnavailableError
from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine.request import Finish, Finished
from draftkeep.serve.engine.scheduler import PREFILL_PER_STEP

SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_p=0.9, repetition_penalty=1.2, frequency_penalty=0.2),
    Sampling(temperature=0.0, presence_penalty=0.4),
    Sampling(temperature=0.9, eos_ids=(5,), stop_ids=(9,), min_tokens=4),
)
LENGTHS = (2, 31, 7, 1, 12)
TOKENS = 15
K = 6


def _replies(lab: Any, **options: Any) -> Any:
    return [
        lab.request(
            str(i), prompt, max_tokens=TOKENS, sampling=SAMPLINGS[i], seed=70 + i, **options
        )
        for i, prompt in enumerate(lab.prompts(LENGTHS))
    ]


def _run(lab: Any, clock: Any, replies: Any, *, slots: Any, **options: Any) -> Any:
    """Every step takes a second. The engine, and what it handed over by request."""
    finished: dict[str, Finished] = {}
    engine = lab.engine(
        slots=slots,
        clock=clock,
        capture_k=K,
        capture_branches=True,
        on_finish=lambda f: finished.update({f.request.request_id: f}),
        **options,
    )
    for reply in replies:
        engine.submit(reply.request)
    steps = 0
    while lab.step(engine, clock):
        steps += 1
        assert engine.stats().running <= slots
        assert steps < 500
    assert all(reply.error is None for reply in replies)
    return engine, finished


@pytest.fixture(scope="module")
def alone(lab: Any) -> Any:
    """Each request by itself and undisturbed: outputs by request."""
    return {
        reply.request.request_id: lab.run(lab.engine(slots=1), [reply])[0]
        for reply in _replies(lab)
    }


@pytest.mark.parametrize("drafter", ["none", "copy", "noisy", "random", "trimmed"])
@pytest.mark.parametrize(("slots", "after_s"), [(1, 1.5), (2, 3.0)])
def test_outputs_do_not_show_that_they_were_interrupted(
    lab: Any, clock: Any, alone: Any, drafter: Any, slots: Any, after_s: Any
) -> None:
    replies = _replies(lab)
    engine, finished = _run(
        lab, clock, replies, slots=slots, drafter=drafter, lookahead=2, preempt_after_s=after_s
    )
    assert engine.stats().preempted >= 2
    for reply in replies:
        lab.assert_same(reply, alone[reply.request.request_id])
    assert len(finished) == len(replies)
    assert engine.stats().waiting == engine.stats().running == 0
    assert engine.stats().prompt_tokens == sum(LENGTHS)
    assert engine.stats().output_tokens == sum(len(reply.tokens) for reply in replies)


@pytest.mark.parametrize("drafter", ["none", "noisy", "random"])
@pytest.mark.parametrize("verification", ["coupled", "rejection"])
def test_what_is_recorded_does_not_show_it_either(
    lab: Any, clock: Any, drafter: Any, verification: Any
) -> None:
    """Same blocks, same distributions, same rejected branches, one entry for every token."""
    options: Any = {"drafter": drafter, "lookahead": 3, "verification": verification}
    replies = _replies(lab, top_logprobs=3)
    _, calm = _run(lab, clock, replies, slots=5, **options)
    again = _replies(lab, top_logprobs=3)
    engine, torn = _run(lab, clock, again, slots=1, preempt_after_s=1.5, **options)
    assert engine.stats().preempted >= 2
    for name, one in calm.items():
        other = torn[name]
        np.testing.assert_array_equal(one.output_ids_T, other.output_ids_T)
        np.testing.assert_array_equal(one.how_T, other.how_T)
        np.testing.assert_array_equal(one.rejected_T, other.rejected_T)
        np.testing.assert_array_equal(one.ids_TK, other.ids_TK)
        np.testing.assert_allclose(one.logprobs_TK, other.logprobs_TK, atol=1e-4)
        np.testing.assert_allclose(one.tail_T, other.tail_T, atol=1e-4)
        assert len(one.ids_TK) == len(one.output_ids_T)
        if verification == "rejection":
            assert len(one.processed_T) == len(one.output_ids_T)
            np.testing.assert_allclose(one.processed_T, other.processed_T, atol=1e-4)
        else:
            assert one.processed_T is other.processed_T is None
        assert one.drafters == other.drafters
        assert (one.steps, one.tested, one.accepted) == (other.steps, other.tested, other.accepted)
        assert [branch.start for branch in one.branches] == [b.start for b in other.branches]
        for branch, same in zip(one.branches, other.branches, strict=True):
            np.testing.assert_array_equal(branch.draft_ids_N, same.draft_ids_N)
            np.testing.assert_allclose(branch.logprobs_NK, same.logprobs_NK, atol=1e-4)
    for reply, other in zip(replies, again, strict=True):
        one_T = [entry.logprob for entry in reply.logprobs]
        np.testing.assert_allclose(one_T, [e.logprob for e in other.logprobs], atol=1e-4)


def test_nobody_gives_way_unless_asked_to(lab: Any, clock: Any) -> None:
    engine, _ = _run(lab, clock, _replies(lab), slots=1)
    assert engine.stats().preempted == 0


def test_whoever_held_a_slot_longest_gives_way_and_waits_its_turn(lab: Any, clock: Any) -> None:
    engine = lab.engine(slots=2, clock=clock, preempt_after_s=10.0)
    first, second, third, fourth = (
        lab.request(name, (1, 2), max_tokens=100) for name in ("a", "b", "c", "d")
    )
    engine.submit(first.request)
    lab.step(engine, clock)
    engine.submit(second.request)
    lab.step(engine, clock)
    engine.submit(third.request)
    lab.step(engine, clock, seconds=10.0)
    assert engine.stats().preempted == 0  # Waited exactly the slice, not longer.
    engine.submit(fourth.request)
    lab.step(engine, clock)
    assert engine.stats().preempted == 1
    counts = [len(reply.tokens) for reply in (first, second, third, fourth)]
    lab.step(engine, clock)
    assert engine.stats().preempted == 1
    assert [len(reply.tokens) for reply in (first, second, third, fourth)] == [
        counts[0],
        counts[1] + 1,
        counts[2] + 1,
        0,
    ]
    # The fourth was in the line before the first came back to it.
    lab.step(engine, clock, seconds=10.0)
    assert engine.stats().preempted == 2
    assert [len(fourth.tokens), len(first.tokens)] == [1, counts[0]]
    assert len(second.tokens) == counts[1] + 1
    # Second's successor has not held its slot for ten seconds yet; third has.
    lab.step(engine, clock, seconds=5.0)
    assert engine.stats().preempted == 3
    assert len(first.tokens) == counts[0] + 1
    assert engine.stats().waiting == 2


@pytest.mark.parametrize("requests", [2, 3])
def test_turns_are_as_long_as_asked(lab: Any, clock: Any, requests: Any) -> None:
    """One slot changes hands every fifth step, however long the others have waited."""
    engine = lab.engine(slots=1, clock=clock, preempt_after_s=4.5)
    for index in range(requests):
        engine.submit(lab.request(str(index), (3, 4), max_tokens=60).request)
    preempted = [0]
    while lab.step(engine, clock):
        preempted.append(engine.stats().preempted)
    turns = [at for at in range(1, len(preempted)) if preempted[at] > preempted[at - 1]]
    assert {later - earlier for earlier, later in pairwise(turns)} == {5}
    assert engine.stats().preempted >= 10


def test_a_long_prompt_gets_somewhere_in_every_turn(lab: Any, clock: Any) -> None:
    """Reading takes longer than a turn lasts; whoever was seated still emits before giving way."""
    length = 4 * PREFILL_PER_STEP
    engine = lab.engine(
        slots=1,
        clock=clock,
        preempt_after_s=1.5,
        target=lab.target(context=length + 8),
        max_context=length + 8,
    )
    replies = [lab.request(name, [7] * length, max_tokens=3) for name in "ab"]
    for reply in replies:
        engine.submit(reply.request)
    steps = 0
    while lab.step(engine, clock):
        steps += 1
        assert steps < 60
    assert [len(reply.tokens) for reply in replies] == [3, 3]
    assert engine.stats().preempted >= 2


def _parked(lab: Any, clock: Any, **options: Any) -> Any:
    """An engine whose request `a` was parked with some tokens, while `b` holds the one slot."""
    engine = lab.engine(slots=1, clock=clock, preempt_after_s=2.5, **options)
    a = lab.request("a", (3, 9, 4), max_tokens=20)
    b = lab.request("b", (8, 8), max_tokens=40)
    for reply in (a, b):
        engine.submit(reply.request)
    while not b.tokens:
        lab.step(engine, clock)
    assert 0 < len(a.tokens) < 20
    assert (engine.stats().running, engine.stats().waiting) == (1, 1)
    return engine, a, b


def test_a_parked_request_is_cancelled_at_once(lab: Any, clock: Any) -> None:
    finished: list[Finished] = []
    engine, a, b = _parked(lab, clock, on_finish=finished.append)
    engine.cancel("a")
    lab.step(engine, clock)
    assert a.finish == Finish.CANCELLED
    assert engine.stats().waiting == 0
    engine.submit(replace(lab.request("a", (1,)).request))
    lab.run(engine, [])
    assert len(b.tokens) == 40
    assert [f.request.prompt_ids for f in finished] == [(8, 8), (1,)]


def test_a_parked_request_is_ended_at_once(lab: Any, clock: Any) -> None:
    finished: list[Finished] = []
    engine, a, _ = _parked(lab, clock, on_finish=finished.append, capture_k=4)
    engine.end("a", 2)
    lab.step(engine, clock)
    assert [f.request.request_id for f in finished] == ["a"]
    assert finished[0].finish == Finish.STOP
    assert finished[0].output_ids_T.tolist() == a.tokens[:2]
    assert len(finished[0].ids_TK) == len(finished[0].how_T) == 2
    assert engine.stats().waiting == 0


def test_close_fails_what_is_parked(lab: Any, clock: Any) -> None:
    engine, a, b = _parked(lab, clock)
    engine.close()
    assert isinstance(a.error, UnavailableError)
    assert isinstance(b.error, UnavailableError)
    assert engine.stats().failed == 2
    assert engine.stats().known == 0


def test_a_failing_pass_spares_what_is_parked(lab: Any, clock: Any, monkeypatch: Any) -> None:
    engine, a, b = _parked(lab, clock, drafter="noisy")
    lab.step_that_fails(engine, monkeypatch)
    assert isinstance(b.error, ModelError)
    lab.run(engine, [])
    assert a.error is None
    lab.assert_same(a, lab.run(lab.engine(), [lab.request("a", (3, 9, 4), max_tokens=20)])[0])


@pytest.mark.parametrize("other", ["none", "trimmed", "copy"])
def test_a_swap_while_parked(lab: Any, clock: Any, other: Any) -> None:
    finished: list[Finished] = []
    engine, a, b = _parked(lab, clock, drafter="noisy", lookahead=2, on_finish=finished.append)
    engine.swap(lab.drafter(other))
    while lab.step(engine, clock):
        pass
    lab.assert_same(a, lab.run(lab.engine(), [lab.request("a", (3, 9, 4), max_tokens=20)])[0])
    lab.assert_same(b, lab.run(lab.engine(), [lab.request("b", (8, 8), max_tokens=40)])[0])
    uses = next(f for f in finished if f.request.request_id == "a").drafters
    digests = [use.digest.rstrip(b".") for use in uses]
    assert digests == [b"noisy", b"" if other == "none" else other.encode()]


def test_the_line_is_bounded_with_the_parked_in_it(lab: Any, clock: Any) -> None:
    engine, _, _ = _parked(lab, clock, queue=2)
    engine.submit(lab.request("c", (1,)).request)
    with pytest.raises(BusyError) as refused:
        engine.submit(lab.request("d", (1,)).request)
    assert refused.value.retry_after_s >= 1.0


def test_a_full_line_says_when_a_place_may_be_free(lab: Any, clock: Any) -> None:
    """A request takes eight steps of three seconds, so a place is free every 24."""
    engine = lab.engine(slots=1, clock=clock, queue=3)
    for index in range(40):
        lab.step(engine, clock, seconds=3.0)
        while engine.stats().waiting < 3:
            name = f"{index}-{engine.stats().waiting}"
            engine.submit(lab.request(name, (1,), max_tokens=8).request)
    with pytest.raises(BusyError) as refused:
        engine.submit(lab.request("late", (1,)).request)
    assert 12.0 < refused.value.retry_after_s <= 24.0
