"""One seed gives one output: for every drafter, lookahead, slot, neighbour and swap point."""

import copy
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from draftkeep.kernels.sampling import Sampling

KINDS = ("none", "copy", "random", "constant", "noisy", "trimmed")
SAMPLINGS = (
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_p=0.8),
    Sampling(temperature=1.3, top_k=12, min_p=0.02),
    Sampling(
        temperature=0.9,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.3,
        logit_bias=((3, 1.5), (7, -100.0)),
    ),
    Sampling(temperature=0.0, repetition_penalty=1.2, logit_bias=((4, 2.0),)),
    Sampling(temperature=0.8, eos_ids=(5,), stop_ids=(9,), min_tokens=6),
)
TOKENS = 14


def _replies(lab: Any, order: Any = None) -> Any:
    prompts = lab.prompts((1, 4, 19, 2, 9, 33))
    replies = [
        lab.request(str(i), prompts[i], max_tokens=TOKENS, sampling=SAMPLINGS[i], seed=100 + i)
        for i in range(len(prompts))
    ]
    return [replies[i] for i in order] if order else replies


@pytest.fixture(scope="module")
def alone(lab: Any) -> Any:
    """Each request by itself on a plain engine."""
    return {
        reply.request.request_id: lab.run(lab.engine(slots=1), [reply])[0]
        for reply in _replies(lab)
    }


def _assert_all_same(lab: Any, replies: Any, alone: Any) -> None:
    for reply in replies:
        lab.assert_same(reply, alone[reply.request.request_id])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("lookahead", "slots"), [(1, 8), (3, 2), (8, 8)])
def test_drafter_lookahead_and_batch_do_not_matter(
    lab: Any, alone: Any, kind: Any, lookahead: Any, slots: Any
) -> None:
    for order in ([0, 1, 2, 3, 4, 5], [5, 2, 4, 0, 3, 1]):
        replies = _replies(lab, order)
        lab.run(lab.engine(drafter=kind, lookahead=lookahead, slots=slots), replies)
        _assert_all_same(lab, replies, alone)


@pytest.mark.parametrize("step", range(12))
def test_a_swap_between_any_two_steps_does_not_matter(lab: Any, alone: Any, step: Any) -> None:
    engine = lab.engine(drafter=KINDS[step % 6], lookahead=3, slots=6)
    replies = _replies(lab)
    for reply in replies:
        engine.submit(reply.request)
    for _ in range(step):
        engine.step()
    engine.swap(lab.drafter(KINDS[(step + 4) % 6]))
    engine.step()
    engine.swap(lab.drafter("copy"))
    lab.run(engine, [])
    _assert_all_same(lab, replies, alone)


def test_automatic_lookahead_does_not_matter(lab: Any, alone: Any) -> None:
    engine = lab.engine(drafter="noisy", mode="auto")
    replies = _replies(lab)
    lab.run(engine, replies)
    _assert_all_same(lab, replies, alone)
    assert engine.stats().tested > 0
    assert engine.stats().speculation.mode == "auto"


def test_a_copy_is_always_accepted_and_an_unrelated_drafter_seldom(lab: Any) -> None:
    rates = {}
    for kind in ("copy", "noisy", "random"):
        engine = lab.engine(drafter=kind)
        lab.run(engine, _replies(lab))
        rates[kind] = engine.stats().accepted / engine.stats().tested
    assert rates["copy"] == 1.0
    assert rates["copy"] > rates["noisy"] > rates["random"]


def test_two_seeds_and_two_choices_differ(lab: Any) -> None:
    prompt = lab.prompts([5])[0]
    one = Sampling(temperature=1.0)
    replies = [
        lab.request("a", prompt, sampling=one, seed=1),
        lab.request("b", prompt, sampling=one, seed=2),
        lab.request("c", prompt, sampling=one, seed=1, choice=1),
        lab.request("d", prompt, sampling=one, seed=1 + 2**64),
    ]
    a, b, c, d = lab.run(lab.engine(), replies)
    assert len({tuple(a), tuple(b), tuple(c)}) == 3
    assert a == d


def test_near_ties_were_shown(lab: Any) -> None:
    """In float32 at this size they are rare; a rise means that passes no longer agree."""
    print("near-ties so far:", lab.near_ties)
    assert len(lab.near_ties) <= 3


class EngineMachine(RuleBasedStateMachine):
    """Requests, swaps, cancellations and steps in any order leave every output as it is alone."""

    lab: Any
    reference: dict[str, list[int]]

    @initialize(kind=st.sampled_from(KINDS), slots=st.integers(1, 4), lookahead=st.integers(1, 5))
    def start(self, kind: Any, slots: Any, lookahead: Any) -> None:
        self.engine = self.lab.engine(drafter=kind, slots=slots, lookahead=lookahead)
        self.replies: list[Any] = []
        self.cancelled: set[str] = set()

    @rule(which=st.integers(0, 5))
    def submit(self, which: Any) -> None:
        reply = _replies(self.lab)[which]
        name = f"{which}-{len(self.replies)}"
        reply = self.lab.request(
            name,
            reply.request.prompt_ids,
            max_tokens=TOKENS,
            sampling=reply.request.sampling,
            seed=reply.request.seed,
        )
        self.replies.append(reply)
        self.engine.submit(reply.request)

    @rule(count=st.integers(1, 5))
    def step(self, count: Any) -> None:
        for _ in range(count):
            self.engine.step()

    @rule(kind=st.sampled_from(KINDS))
    def swap(self, kind: Any) -> None:
        self.engine.swap(self.lab.drafter(kind))

    @rule(index=st.integers(0, 20))
    def cancel(self, index: Any) -> None:
        running = [r for r in self.replies if r.finish is None]
        if running:
            reply = running[index % len(running)]
            self.cancelled.add(reply.request.request_id)
            self.engine.cancel(reply.request.request_id)

    def teardown(self) -> None:
        while self.engine.step():
            pass
        for reply in self.replies:
            expected = self.reference[reply.request.request_id.split("-")[0]]
            if reply.request.request_id in self.cancelled:
                expected = expected[: len(reply.tokens)]
            self.lab.assert_same(reply, expected)
        stats = self.engine.stats()
        assert stats.running == stats.waiting == 0
        assert stats.finished + stats.cancelled == len(self.replies)


def test_any_order_of_events(lab: Any, alone: Any) -> None:
    machine: Any = type("Machine", (EngineMachine,), {"lab": lab, "reference": copy.copy(alone)})
    run = settings(
        max_examples=20,
        stateful_step_count=12,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    machine.TestCase.settings = run
    machine.TestCase("runTest").runTest()
