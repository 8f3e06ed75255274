"""What is captured is what the target computed, position by position, and only where allowed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from draftkeep.kernels.sampling import Sampling
from draftkeep.kernels.topk import TopKLse
from draftkeep.serve.engine import recorder
from draftkeep.serve.engine.ngram import NgramDrafter
from draftkeep.serve.engine.request import Finished, How
from draftkeep.serve.engine.spans import Span, look_through

K = 8


def _finished(
    lab: Any,
    *,
    drafter: Any,
    sampling: Any = None,
    branches: Any = False,
    swap_at: Any = None,
    capture: Any = True,
    turns: Any = None,
    rule: Any = "coupled",
) -> Any:
    """Four requests, together or (`turns`) taking turns in two slots."""
    out: list[Finished] = []
    options = {"clock": turns, "preempt_after_s": 1.5, "slots": 2} if turns else {}
    options["verification"] = rule
    if drafter == "n-gram":
        options["floor"], drafter = NgramDrafter(2, 1), "none"
    engine = lab.engine(
        drafter=drafter, on_finish=out.append, capture_k=K, capture_branches=branches, **options
    )
    for index, prompt in enumerate(lab.prompts((3, 11, 1, 26))):
        reply = lab.request(
            str(index), prompt, max_tokens=18, sampling=sampling, seed=index, capture=capture
        )
        engine.submit(reply.request)
    for step in range(200):
        if step == swap_at:
            engine.swap(lab.drafter("noisy"))
        if turns:
            turns.now_s += 1.0
        if not engine.step():
            break
    assert bool(engine.stats().preempted) == bool(turns)
    return sorted(out, key=lambda finished: finished.request.request_id)


def _logprobs(lab: Any, tokens: Any) -> Any:
    return torch.from_numpy(lab.logits(tokens)).log_softmax(-1).numpy()


def _tail(rows: Any) -> Any:
    """The log of the mass outside the `K` best of every row."""
    best = np.sort(rows.astype(np.float64), axis=-1)[:, ::-1][:, :K]
    return np.log1p(-np.exp(best).sum(-1))


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("drafter", ["none", "copy", "noisy", "random", "n-gram"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("disturbed", [False, True])
def test_equals_a_fresh_teacher_forced_pass(
    lab: Any, clock: Any, drafter: Any, temperature: Any, disturbed: Any, rule: Any
) -> None:
    """Also where requests take turns in two slots and the drafter is swapped in between."""
    sampling = Sampling(temperature=temperature, top_p=0.9, presence_penalty=0.2)
    disturbance = {"turns": clock, "swap_at": 3} if disturbed else {}
    tested = 0
    for finished in _finished(lab, drafter=drafter, sampling=sampling, rule=rule, **disturbance):
        tested += finished.tested
        prompt, output = finished.request.prompt_ids, finished.output_ids_T.tolist()
        rows = _logprobs(lab, [*prompt, *output])[len(prompt) - 1 : -1]
        assert finished.ids_TK.shape == (len(output), K)
        np.testing.assert_allclose(
            np.take_along_axis(rows, finished.ids_TK, -1), finished.logprobs_TK, atol=1e-4
        )
        best = np.sort(rows, axis=-1)[:, ::-1][:, :K]
        np.testing.assert_allclose(best, finished.logprobs_TK, atol=1e-4)
        np.testing.assert_allclose(finished.tail_T, _tail(rows), atol=1e-3)
    assert (tested > 0) == (drafter != "none" or disturbed)


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter", ["noisy", "random", "n-gram"])
@pytest.mark.parametrize("disturbed", [False, True])
def test_rejected_branches_hold_the_distributions_behind_the_rejected_draft(
    lab: Any, clock: Any, drafter: Any, temperature: Any, disturbed: Any, rule: Any
) -> None:
    seen = 0
    sampling = Sampling(temperature=temperature)
    disturbance = {"turns": clock, "swap_at": 5} if disturbed else {}
    options = {"sampling": sampling, "branches": True, "rule": rule, **disturbance}
    for finished in _finished(lab, drafter=drafter, **options):
        prompt, output = list(finished.request.prompt_ids), finished.output_ids_T.tolist()
        for branch in finished.branches:
            drafts = branch.draft_ids_N.tolist()
            assert finished.how_T[branch.start] == How.CORRECTED
            assert finished.rejected_T[branch.start] == drafts[0]
            rows = _logprobs(lab, prompt + output[: branch.start] + drafts)[-len(drafts) :]
            np.testing.assert_allclose(
                np.take_along_axis(rows, branch.ids_NK, -1), branch.logprobs_NK, atol=1e-4
            )
            np.testing.assert_allclose(branch.tail_N, _tail(rows), atol=1e-3)
            seen += len(drafts)
        assert len(finished.branches) == int((finished.how_T == How.CORRECTED).sum())
    assert seen > 10


def test_a_request_that_refuses_capture_leaves_no_distribution(lab: Any) -> None:
    for finished in _finished(lab, drafter="noisy", branches=True, capture=False):
        assert finished.ids_TK.shape == finished.logprobs_TK.shape == (18, 0)
        assert finished.branches == ()
        assert finished.tested > 0


def test_drafter_runs_follow_a_swap(lab: Any) -> None:
    finished = _finished(lab, drafter="random", swap_at=3)[0]
    assert [use.digest.rstrip(b".") for use in finished.drafters] == [b"random", b"noisy"]
    assert sum(use.positions for use in finished.drafters) == 18
    assert all(use.context_start == 0 for use in finished.drafters)
    plain = _finished(lab, drafter="none")[0]
    assert [(use.digest, use.positions) for use in plain.drafters] == [(b"", 18)]


def test_live_counts_equal_a_teacher_forced_replay(lab: Any) -> None:
    """At every tested position the drafter's own draw on the true prefix decides acceptance."""
    drafter = lab.drafter("noisy").model
    for finished in _finished(lab, drafter="noisy"):
        prompt, output = list(finished.request.prompt_ids), finished.output_ids_T.tolist()
        with torch.inference_mode():
            ids = torch.tensor([prompt + output])
            logits = drafter(input_ids=ids, use_cache=False).logits[0].numpy()
        own = logits[len(prompt) - 1 : -1].argmax(-1)
        agree = own == finished.output_ids_T
        assert agree[finished.how_T == How.ACCEPTED].all()
        corrected = finished.how_T == How.CORRECTED
        assert (own[corrected] == finished.rejected_T[corrected]).all()


class Topk:
    """Stands for capture's top-k: notes when it ran, and fails while it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, told: list[str]) -> None:
        self.fails = False
        self._told = told
        monkeypatch.setattr(recorder, "look_through", self)

    def __call__(
        self, logits_NV: torch.Tensor, spans: Sequence[Span], k: int
    ) -> tuple[torch.Tensor, list[Span], TopKLse]:
        self._told.append("capture")
        if self.fails:
            raise MemoryError
        return look_through(logits_NV, spans, k)


@pytest.mark.parametrize("drafter", ["none", "noisy"])
@pytest.mark.parametrize("asked", [None, 3])
def test_it_waits_until_everybody_has_the_tokens_of_the_step(
    lab: Any, monkeypatch: pytest.MonkeyPatch, drafter: Any, asked: Any
) -> None:
    """Also of a request's last step, which is handed over whole behind it."""
    told: list[str] = []
    Topk(monkeypatch, told)

    def on_finish(finished: Finished) -> None:
        assert finished.ids_TK.shape == (len(finished.output_ids_T), K)
        assert finished.ids_TK.min() >= 0
        told.append("finished")

    engine = lab.engine(
        drafter=drafter,
        capture_k=K,
        on_finish=on_finish,
        on_step=lambda report: told.append(f"step of {len(report.rows)}"),
    )
    for number in range(4):
        reply = lab.request(str(number), (1, 2, number), max_tokens=3 + number, top_logprobs=asked)
        engine.submit(replace(reply.request, on_tokens=lambda _: told.append("tokens")))
    lab.run(engine, [])
    steps = " ".join(told).split(" step of ")
    assert told.count("finished") == 4
    assert told.count("capture") == engine.stats().steps == len(steps) - 1
    rows = [int(step[0]) for step in steps[1:]]
    for count, step in zip(rows, steps, strict=False):
        words = step.split()
        words = words[1:] if words[0].isdigit() else words
        ended = words.count("finished")
        assert words == ["tokens"] * count + ["capture"] + ["finished"] * ended


def test_an_end_from_within_a_delivery_keeps_what_was_captured(lab: Any) -> None:
    """And a caller that fails there costs its neighbours nothing."""
    finished: list[Finished] = []
    engine = lab.engine(drafter="noisy", capture_k=K, on_finish=finished.append)
    seen = 0

    def on_tokens(emission: Any) -> None:
        nonlocal seen
        seen += len(emission.tokens)
        if seen > 4:
            engine.end("ended", 4)

    def broken(emission: Any) -> None:
        raise OSError

    for name, function in [("broken", broken), ("ended", on_tokens), ("whole", lambda _: None)]:
        reply = lab.request(name, (1, 2, 3), max_tokens=9)
        engine.submit(replace(reply.request, on_tokens=function))
    lab.run(engine, [])
    lengths = {one.request.request_id: one.ids_TK.shape for one in finished}
    assert lengths == {"ended": (4, K), "whole": (9, K)}
    for one in finished:
        output = one.output_ids_T.tolist()
        rows = _logprobs(lab, [1, 2, 3, *output])[2:-1]
        best = np.sort(rows, axis=-1)[:, ::-1][:, :K]
        np.testing.assert_allclose(best, one.logprobs_TK, atol=1e-4)


def test_a_capture_that_keeps_failing_pauses_longer_each_time(
    lab: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    topk = Topk(monkeypatch, told)
    problems: list[tuple[str, type]] = []
    finished: list[Finished] = []
    engine = lab.engine(
        capture_k=K,
        clock=clock,
        on_finish=finished.append,
        on_problem=lambda kind, error: problems.append((kind, type(error))),
    )

    def tries(requests: int, *, seconds: float = 0.0) -> int:
        """How often capture was tried in so many requests, each after so many seconds."""
        told.clear()
        for number in range(requests):
            clock.now_s += seconds
            lab.run(engine, [lab.request(str(number), (1, 2), max_tokens=4, top_logprobs=2)])
        return len(told)

    topk.fails = True
    assert tries(2) == 2
    assert problems == [("capture", MemoryError)] * 2
    problems.clear()
    assert tries(1) == 1
    assert problems == [("capture, which pauses for a while,", MemoryError)]
    # Every pause ends with one try, which begins the next, twice as long.
    assert tries(8) == 0
    assert tries(1, seconds=1.0) == 1
    assert tries(1, seconds=1.5) == 0
    assert tries(1, seconds=0.5) == 1
    assert tries(3, seconds=1.0) == 0
    assert tries(1, seconds=1.0) == 1
    assert tries(20, seconds=61.0) == 20
    assert len(problems) == 1
    assert engine.stats().capture_failed == len(finished) == 38
    assert all(one.ids_TK.shape == (4, 0) for one in finished)
    topk.fails = False
    assert tries(1) == 0
    assert tries(1, seconds=60.0) == 4
    assert problems[1:] == [("capture, which works again, last", MemoryError)]
    assert finished[-1].ids_TK.shape == (4, K)
    topk.fails = True
    assert tries(2) == 2
    assert problems[2:] == [("capture", MemoryError)] * 2


def test_requests_under_way_lose_their_capture_in_a_pause(
    lab: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trace with a hole is none, and the try after the pause is a whole one."""
    topk = Topk(monkeypatch, [])
    topk.fails = True
    finished: list[Finished] = []
    engine = lab.engine(capture_k=K, clock=clock, on_finish=finished.append)
    for number in range(3):
        lab.run(engine, [lab.request(str(number), (1, 2), max_tokens=2)])
    topk.fails = False
    engine.submit(lab.request("early", (1, 2), max_tokens=9).request)
    engine.step()
    clock.now_s += 2.0
    engine.submit(lab.request("late", (1, 2), max_tokens=9).request)
    lab.run(engine, [])
    lengths = {one.request.request_id: one.ids_TK.shape for one in finished[3:]}
    assert lengths == {"early": (9, 0), "late": (9, K)}
    assert engine.stats().capture_failed == 4
