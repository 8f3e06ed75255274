"""Whatever happens in whatever order, every request ends once and with its own output."""

from collections import Counter
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from draftkeep.errors import BusyError
from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine.request import Finish, Finished, StepReport

KINDS = ("none", "copy", "random", "noisy", "trimmed")
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=1.0),
    Sampling(temperature=0.9, repetition_penalty=1.3, presence_penalty=0.4),
    Sampling(temperature=0.8, eos_ids=(5,), stop_ids=(9,), min_tokens=3),
)
LENGTHS = (1, 4, 9, 33)
TOKENS = 14
QUEUE = 4
TURN_S = 3.0
EXAMPLES = 90


def _reply(lab: Any, which: Any, name: Any = "alone") -> Any:
    prompt = lab.prompts(LENGTHS)[which]
    return lab.request(
        name,
        prompt,
        max_tokens=TOKENS,
        sampling=SAMPLINGS[which],
        seed=40 + which,
        top_logprobs=1,
    )


class EngineMachine(RuleBasedStateMachine):
    """An engine beside the little that a caller knows of it."""

    lab: Any
    reference: list[list[int]]
    new_clock: Any

    @initialize(
        kind=st.sampled_from(KINDS),
        slots=st.integers(1, 3),
        lookahead=st.integers(1, 4),
        turns=st.booleans(),
    )
    def start(self, kind: Any, slots: Any, lookahead: Any, turns: Any) -> None:
        self.slots = slots
        self.clock = self.new_clock()
        self.finished: dict[str, Finished] = {}
        self.replies: dict[str, Any] = {}
        self.which: dict[str, int] = {}
        self.cancelled: set[str] = set()
        self.ended: dict[str, int] = {}
        self.totals: Counter[str] = Counter()
        self.engine = self.lab.engine(
            drafter=kind,
            slots=slots,
            lookahead=lookahead,
            queue=QUEUE,
            clock=self.clock,
            preempt_after_s=TURN_S if turns else 0.0,
            capture_k=3,
            on_finish=self._on_finish,
            on_step=self._on_step,
        )

    def _on_finish(self, finished: Finished) -> None:
        assert finished.request.request_id not in self.finished
        self.finished[finished.request.request_id] = finished

    def _on_step(self, report: StepReport) -> None:
        self.totals.update(steps=1, row_steps=len(report.rows))
        for row in report.rows:
            self.totals.update(
                output_tokens=row.emitted,
                drafted=row.drafted,
                tested=row.tested,
                accepted=row.accepted,
            )

    @rule(which=st.integers(0, len(LENGTHS) - 1))
    def submit(self, which: Any) -> None:
        name = f"r{len(self.replies)}"
        reply = _reply(self.lab, which, name)
        full = self.engine.stats().waiting >= QUEUE
        try:
            self.engine.submit(reply.request)
        except BusyError:
            assert full
            return
        assert not full
        self.replies[name], self.which[name] = reply, which

    @rule(count=st.integers(1, 4), seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def step(self, count: Any, seconds: Any) -> None:
        for _ in range(count):
            self.lab.step(self.engine, self.clock, seconds=seconds)

    @rule(kind=st.sampled_from(KINDS))
    def swap(self, kind: Any) -> None:
        self.engine.swap(self.lab.drafter(kind))

    def _open(self) -> list[str]:
        over = {name for name, reply in self.replies.items() if reply.finish is not None}
        return [name for name in self.replies if name not in over | self.finished.keys()]

    @precondition(lambda self: self._open())
    @rule(index=st.integers(0, 20))
    def cancel(self, index: Any) -> None:
        """Whether it runs, waits or is parked; it is gone after the next step."""
        names = self._open()
        name = names[index % len(names)]
        self.cancelled.add(name)
        self.engine.cancel(name)
        self.lab.step(self.engine, self.clock)
        assert self.replies[name].finish == Finish.CANCELLED

    @precondition(lambda self: any(self.replies[name].tokens for name in self._open()))
    @rule(index=st.integers(0, 20), short=st.integers(0, 3))
    def end(self, index: Any, short: Any) -> None:
        """Ended at a token it has written already."""
        names = [name for name in self._open() if self.replies[name].tokens]
        name = names[index % len(names)]
        length = max(1, len(self.replies[name].tokens) - short)
        self.ended[name] = length
        self.engine.end(name, length)
        self.lab.step(self.engine, self.clock)
        assert len(self.finished[name].output_ids_T) == length

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        stats = self.engine.stats()
        assert stats.running <= self.slots
        assert stats.running + stats.waiting == len(self._open())
        assert stats.waiting <= QUEUE + self.slots
        assert stats.finished == len(self.finished)
        assert stats.cancelled == len(self.cancelled)
        assert stats.failed == stats.callback_failed == stats.capture_failed == 0
        for name, total in self.totals.items():
            assert getattr(stats, name) == total

    def teardown(self) -> None:
        for _ in range(400):
            if not self.lab.step(self.engine, self.clock):
                break
        self.nothing_is_lost_or_doubled()
        assert not self._open()
        assert self.engine.stats().known == self.engine.stats().leaving == 0
        for name, reply in self.replies.items():
            assert reply.error is None
            assert len(reply.logprobs) == len(reply.tokens)
            self._check_output(name, reply)

    def _check_output(self, name: str, reply: Any) -> None:
        expected = self.reference[self.which[name]]
        if name in self.cancelled or name in self.ended:
            expected = expected[: len(reply.tokens)]
        self.lab.assert_same(reply, expected)
        if name in self.cancelled:
            assert name not in self.finished
            return
        finished = self.finished[name]
        length = self.ended.get(name, len(reply.tokens))
        assert finished.output_ids_T.tolist() == reply.tokens[:length]
        assert len(finished.ids_TK) == len(finished.how_T) == length
        assert finished.ids_TK.min() >= 0


def test_any_order_of_events(lab: Any, clock: Any) -> None:
    reference = [
        lab.run(lab.engine(slots=1), [_reply(lab, which)])[0] for which in range(len(LENGTHS))
    ]
    machine: Any = type(
        "Machine",
        (EngineMachine,),
        {"lab": lab, "reference": reference, "new_clock": type(clock)},
    )
    machine.TestCase.settings = settings(
        max_examples=EXAMPLES,
        stateful_step_count=20,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    machine.TestCase("runTest").runTest()
