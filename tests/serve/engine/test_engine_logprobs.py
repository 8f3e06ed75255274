"""Log-probabilities are the target's raw ones, one entry for every token, whatever drafted it."""

from typing import Any

import numpy as np
import pytest
import torch

from draftkeep.errors import InputError, ModelError
from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine import recorder
from draftkeep.serve.engine.request import Finished, How

PROMPT = (35, 40, 5, 46)
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=1.5, top_k=20),
    Sampling(temperature=0.7, repetition_penalty=1.5, logit_bias=((3, 20.0),)),
)


def _assert_raw(lab: Any, reply: Any, top: Any) -> None:
    """Every entry against a fresh pass over prompt and output."""
    prompt, tokens = list(reply.request.prompt_ids), reply.tokens
    assert len(reply.logprobs) == len(tokens)
    rows = torch.from_numpy(lab.logits([*prompt, *tokens])).log_softmax(-1).numpy()
    for token, entry, row_V in zip(tokens, reply.logprobs, rows[len(prompt) - 1 : -1], strict=True):
        assert entry.logprob == pytest.approx(float(row_V[token]), abs=1e-4)
        best = np.sort(row_V)[::-1][:top]
        np.testing.assert_allclose([value for _, value in entry.top], best, atol=1e-4)
        np.testing.assert_allclose([row_V[i] for i, _ in entry.top], best, atol=1e-4)
        listed = dict(entry.top)
        assert listed.get(token, entry.logprob) == entry.logprob


@pytest.mark.parametrize("drafter", ["none", "copy", "noisy", "trimmed"])
@pytest.mark.parametrize("capture_k", [0, 4, 32])
def test_equals_a_fresh_pass(lab: Any, drafter: Any, capture_k: Any) -> None:
    finished: list[Finished] = []
    engine = lab.engine(
        drafter=drafter, lookahead=3, capture_k=capture_k, on_finish=finished.append
    )
    tops = (0, 5, 20)
    replies = [
        lab.request(
            str(index),
            prompt,
            sampling=SAMPLINGS[index],
            seed=index,
            top_logprobs=tops[index],
            capture=index != 1,
        )
        for index, prompt in enumerate(lab.prompts((4, 9, 2)))
    ]
    silent = lab.request("silent", (1, 2, 3))
    lab.run(engine, [*replies, silent])
    for reply, top in zip(replies, tops, strict=True):
        _assert_raw(lab, reply, top)
    assert silent.logprobs == []
    hows = {How(how) for result in finished for how in result.how_T.tolist()}
    assert (
        hows
        >= {
            "none": {How.PLAIN},
            "copy": {How.ACCEPTED, How.BONUS},
            "noisy": {How.ACCEPTED, How.BONUS, How.CORRECTED},
            "trimmed": {How.CORRECTED},
        }[drafter]
    )


def test_a_token_outside_the_list_has_its_own_value(lab: Any) -> None:
    """The bias makes the target write a token that it thinks little of."""
    sampling = Sampling(temperature=0.0, logit_bias=((17, 1000.0),))
    reply = lab.request("a", PROMPT, sampling=sampling, top_logprobs=2)
    lab.run(lab.engine(drafter="noisy"), [reply])
    assert set(reply.tokens) == {17}
    assert any(17 not in dict(entry.top) for entry in reply.logprobs)
    _assert_raw(lab, reply, 2)


@pytest.mark.parametrize(("capture_k", "asked"), [(4, 20), (32, 20), (8, 0)])
def test_what_is_captured_does_not_depend_on_them(lab: Any, capture_k: Any, asked: Any) -> None:
    results = []
    for top_logprobs in (None, asked):
        finished: list[Finished] = []
        engine = lab.engine(drafter="noisy", capture_k=capture_k, on_finish=finished.append)
        lab.run(engine, [lab.request("a", PROMPT, top_logprobs=top_logprobs)])
        results.append(finished[0])
    plain, beside = results
    np.testing.assert_array_equal(plain.ids_TK, beside.ids_TK)
    np.testing.assert_allclose(plain.logprobs_TK, beside.logprobs_TK, atol=1e-6)
    np.testing.assert_allclose(plain.tail_T, beside.tail_T, atol=1e-5)


def test_a_lost_capture_does_not_lose_them(lab: Any, monkeypatch: Any) -> None:
    def failing(*arguments: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(recorder, "look_through", failing)
    finished: list[Finished] = []
    engine = lab.engine(drafter="noisy", capture_k=8, on_finish=finished.append)
    for number in range(5):
        reply = lab.request(str(number), PROMPT, top_logprobs=5)
        lab.run(engine, [reply])
        _assert_raw(lab, reply, 5)
    assert [one.ids_TK.shape for one in finished] == [(16, 0)] * 5
    assert engine.stats().capture_failed == 5
    assert engine.stats().failed == 0


@pytest.mark.parametrize("place", range(4))
def test_a_row_of_nan_beside_them_fails_alone(lab: Any, monkeypatch: Any, place: Any) -> None:
    """Wherever it is among the others, and they keep their capture as well."""
    finished: list[Finished] = []
    engine = lab.engine(capture_k=4, on_finish=finished.append)
    replies = [lab.request(str(i), PROMPT, top_logprobs=3) for i in range(4)]
    for reply in replies:
        engine.submit(reply.request)
    engine.step()
    lab.step_with_nan(engine, monkeypatch, row=place)
    bad = replies.pop(place)
    assert isinstance(bad.error, ModelError)
    lab.run(engine, [])
    for reply in replies:
        _assert_raw(lab, reply, 3)
    assert [one.ids_TK.shape for one in finished] == [(16, 4)] * 3


@pytest.mark.parametrize("asked", [-1, 21])
def test_more_than_twenty_are_refused(lab: Any, asked: Any) -> None:
    with pytest.raises(InputError, match="0 to 20") as refused:
        lab.engine().submit(lab.request("a", PROMPT, top_logprobs=asked).request)
    assert refused.value.param == "top_logprobs"


def test_a_list_may_be_longer_than_the_vocabulary(lab: Any) -> None:
    reply = lab.request("a", (1, 2), top_logprobs=20)
    lab.run(lab.engine(vocab=12), [reply])
    assert all(len(entry.top) == 12 for entry in reply.logprobs)
