"""The output ends at the earliest end, wherever in a block it falls, and counting ends with it."""

from dataclasses import replace
from typing import Any

import pytest

from draftkeep.errors import BusyError, InputError
from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine.request import Finish, Finished, How

# The tiny target answers this prompt with twelve different tokens, so each can be made the end.
PROMPT = (35, 40, 5, 46)
TOKENS = 12
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(scope="module")
def emitted(lab: Any) -> Any:
    tokens = lab.run(lab.engine(), [lab.request("a", PROMPT, max_tokens=TOKENS)])[0]
    assert len(set(tokens)) == TOKENS
    return tokens


def _one(
    lab: Any, sampling: Any, *, max_tokens: Any = TOKENS, drafter: Any = "copy", lookahead: Any = 5
) -> Any:
    """Run one request beside a neighbour; its reply and what the engine handed over.

    Both must account for the same tokens, and the counters for nothing else.
    """
    finished: list[Finished] = []
    engine = lab.engine(
        drafter=drafter, lookahead=lookahead, on_finish=finished.append, capture_k=4
    )
    reply = lab.request("a", PROMPT, max_tokens=max_tokens, sampling=sampling, top_logprobs=2)
    beside = lab.request("b", (1, 2), max_tokens=20)
    lab.run(engine, [reply, beside])
    result = next(f for f in finished if f.request.request_id == "a")
    assert result.output_ids_T.tolist() == reply.tokens
    assert len(reply.logprobs) == len(reply.tokens)
    _assert_cut(result, len(reply.tokens))
    stats = engine.stats()
    assert stats.output_tokens == len(reply.tokens) + len(beside.tokens)
    assert stats.tested == sum(f.tested for f in finished)
    assert stats.accepted == sum(f.accepted for f in finished)
    return reply, result


def _assert_cut(finished: Any, length: Any) -> None:
    """Everything that was handed over of a request has that length."""
    parts = (
        finished.output_ids_T,
        finished.ids_TK,
        finished.logprobs_TK,
        finished.tail_T,
        finished.how_T,
        finished.rejected_T,
    )
    assert {len(part) for part in parts} == {length}
    assert sum(use.positions for use in finished.drafters) == length
    assert all(branch.start < length for branch in finished.branches)


@pytest.mark.parametrize("drafter", ["copy", "noisy", "none"])
@pytest.mark.parametrize("kind", ["eos", "stop"])
@pytest.mark.parametrize("at", range(TOKENS))
def test_an_ending_token_at_every_offset(
    lab: Any, emitted: Any, at: Any, kind: Any, drafter: Any
) -> None:
    end = emitted[at]
    expected = emitted[: at + 1]
    ids: Any = {f"{kind}_ids": (end,)}
    sampling = Sampling(temperature=0.0, **ids)
    reply, finished = _one(lab, sampling, drafter=drafter)
    assert reply.tokens == expected
    assert reply.finish == finished.finish == Finish.STOP
    assert finished.output_ids_T.tolist() == expected
    assert len(finished.ids_TK) == len(finished.how_T) == len(expected)
    if drafter == "copy":
        # Every draft agrees: blocks of six, cut where the end falls.
        assert finished.steps == -(-len(expected) // 6)
        bonus = len(expected) // 6
        assert finished.tested == finished.accepted == len(expected) - bonus


@pytest.mark.parametrize("lookahead", [1, 2, 5, 8])
@pytest.mark.parametrize("length", range(1, TOKENS))
def test_length_at_every_offset(lab: Any, emitted: Any, length: Any, lookahead: Any) -> None:
    reply, finished = _one(lab, GREEDY, max_tokens=length, lookahead=lookahead)
    assert reply.tokens == emitted[:length]
    assert reply.finish == Finish.LENGTH
    assert finished.accepted <= finished.tested
    assert finished.accepted + finished.steps == length


def test_an_end_at_the_last_allowed_token_is_a_stop(lab: Any, emitted: Any) -> None:
    sampling = Sampling(temperature=0.0, eos_ids=(emitted[5],))
    reply, _ = _one(lab, sampling, max_tokens=6)
    assert reply.tokens == emitted[:6]
    assert reply.finish == Finish.STOP


def test_ignored_eos_goes_on(lab: Any, emitted: Any) -> None:
    sampling = Sampling(temperature=0.0, eos_ids=tuple(set(emitted)), ignore_eos=True)
    reply, _ = _one(lab, sampling)
    assert reply.tokens == emitted
    assert reply.finish == Finish.LENGTH


@pytest.mark.parametrize("drafter", ["copy", "none"])
def test_min_tokens_bars_the_end_until_then(lab: Any, emitted: Any, drafter: Any) -> None:
    sampling = Sampling(temperature=0.0, eos_ids=(emitted[0],), min_tokens=5)
    reply, _ = _one(lab, sampling, drafter=drafter)
    assert emitted[0] not in reply.tokens[:5]
    plain, _ = _one(lab, replace(sampling, ignore_eos=True), drafter="none")
    assert reply.tokens == plain.tokens[: len(reply.tokens)]


def test_the_context_ends_an_output(lab: Any) -> None:
    reply = lab.request("a", lab.prompts([120])[0], max_tokens=100)
    lab.run(lab.engine(drafter="copy", lookahead=8), [reply])
    assert len(reply.tokens) == 8
    assert reply.finish == Finish.LENGTH


@pytest.mark.parametrize("drafter", ["copy", "noisy", "random", "none"])
def test_how_the_tokens_came_about_adds_up(lab: Any, drafter: Any) -> None:
    _, finished = _one(lab, Sampling(temperature=0.8), drafter=drafter)
    how = finished.how_T.tolist()
    assert finished.accepted == how.count(How.ACCEPTED)
    assert finished.tested == finished.accepted + how.count(How.CORRECTED)
    corrected = finished.how_T == How.CORRECTED
    assert ((finished.rejected_T >= 0) == corrected).all()
    assert (finished.rejected_T[corrected] != finished.output_ids_T[corrected]).all()
    # The last step may have no room for a draft.
    assert how.count(How.PLAIN) == (TOKENS if drafter == "none" else how[-1] == How.PLAIN)


@pytest.mark.parametrize("drafter", ["copy", "noisy", "none"])
@pytest.mark.parametrize("length", range(1, TOKENS + 1))
def test_a_caller_can_end_an_output_at_every_offset(
    lab: Any, emitted: Any, length: Any, drafter: Any
) -> None:
    """A stop string was found in the text: the hand-over is cut where the caller says."""
    finished: list[Finished] = []
    engine = lab.engine(
        drafter=drafter,
        lookahead=5,
        on_finish=finished.append,
        capture_k=4,
        capture_branches=True,
    )
    reply = lab.request("a", PROMPT, max_tokens=TOKENS + 8, top_logprobs=1)
    inner = reply.request.on_tokens

    def on_tokens(emission: Any) -> None:
        assert len(emission.logprobs) == len(emission.tokens)
        inner(emission)
        if len(reply.tokens) >= length:
            engine.end("a", length)

    engine.submit(replace(reply.request, on_tokens=on_tokens))
    while engine.step():
        pass
    assert sum(reply.calls[:-1]) < length <= sum(reply.calls)
    assert finished[0].output_ids_T.tolist() == emitted[:length]
    assert finished[0].finish == Finish.STOP
    _assert_cut(finished[0], length)
    stats = engine.stats()
    assert (stats.running, stats.finished) == (0, 1)
    assert stats.output_tokens == length
    assert (stats.tested, stats.accepted) == (finished[0].tested, finished[0].accepted)
    assert stats.row_steps == finished[0].steps == len(reply.calls)
    if drafter == "copy":
        bonus = length // 6
        assert stats.drafted == stats.tested == stats.accepted == length - bonus
    how = finished[0].how_T.tolist()
    assert stats.tested == how.count(How.ACCEPTED) + how.count(How.CORRECTED)


def test_an_end_asked_from_outside_comes_before_the_next_step(lab: Any, emitted: Any) -> None:
    finished: list[Finished] = []
    engine = lab.engine(on_finish=finished.append)
    reply = lab.request("a", PROMPT, max_tokens=TOKENS)
    engine.submit(reply.request)
    for _ in range(5):
        engine.step()
    engine.end("a", 3)
    engine.end("unknown", 3)
    assert not engine.step()
    assert reply.tokens == emitted[:5]
    assert finished[0].output_ids_T.tolist() == emitted[:3]
    assert finished[0].finish == Finish.STOP


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ((), {}, "empty"),
        (tuple([1] * 128), {}, "shorten"),
        ((48,), {}, "tokenizer"),
        ((-1,), {}, "tokenizer"),
        ((1,), {"max_tokens": 0}, "max_tokens"),
        ((1,), {"sampling": Sampling(logit_bias=((99, 1.0),))}, "logit_bias"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(
    lab: Any, prompt: Any, options: Any, words: Any
) -> None:
    engine = lab.engine()
    with pytest.raises(InputError, match=words):
        engine.submit(lab.request("a", prompt, **options).request)
    assert engine.stats().waiting == 0


def test_the_queue_is_bounded_and_ids_are_unique(lab: Any) -> None:
    engine = lab.engine(slots=1, queue=2)
    engine.submit(lab.request("a", (1,)).request)
    with pytest.raises(InputError, match="id"):
        engine.submit(lab.request("a", (1,)).request)
    engine.submit(lab.request("b", (1,)).request)
    with pytest.raises(BusyError, match="later"):
        engine.submit(lab.request("c", (1,)).request)
    engine.step()
    engine.submit(lab.request("c", (1,)).request)
