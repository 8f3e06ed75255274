"""What is captured is what the target computed, position by position, and only where allowed."""

from typing import Any

import numpy as np
import pytest
import torch

from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine.ngram import NgramDrafter
from draftkeep.serve.engine.request import Finished, How

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
