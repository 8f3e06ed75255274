"""Class C: an output ends at its first end, and a block never runs past a limit."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine.drafting import DraftModel
from draftkeep.serve.engine.request import Finish, Finished
from draftkeep.store.models.target import TargetModel
from tests.faults.house import (
    CHAT,
    COMPLETIONS,
    LOOKAHEAD,
    House,
    body_for,
    piece_of,
    text_of,
)
from tests.faults.plain import engine_over, plain_output
from tests.serve.script import Script

PROMPT = (35, 40, 5, 46)
GREEDY = Sampling(temperature=0.0)
BLOCK = LOOKAHEAD + 1
# The context of the stations.
CONTEXT = 256
# Greedy without a minimum ends after a few tokens; this goes on as long as it may.
ENDLESS: dict[str, Any] = {"temperature": 0.8, "ignore_eos": True}


@pytest.fixture(scope="module")
def emitted(lab: Any) -> list[int]:
    """Different tokens, each of which can be declared the end."""
    tokens = plain_output(lab, PROMPT, GREEDY, tokens=12)
    assert len(set(tokens)) == 12
    return tokens


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("most", range(1, BLOCK + 2))
@pytest.mark.parametrize("at", range(BLOCK + 1))
def test_of_a_stop_and_a_limit_in_one_block_the_first_wins(
    lab: Any, emitted: list[int], at: int, most: int, rule: str
) -> None:
    """sgl#31599, #31569: a block that held a stop and crossed max_tokens said "length" and kept the
    tokens behind the stop. Beside them sgl#33758 and HabanaAI/vllm-fork#1435: the bonus token
    behind an EOS, and a look at one fixed offset."""
    finished: list[Finished] = []
    engine = lab.engine(
        floor=Script({"a": emitted}),
        lookahead=LOOKAHEAD,
        verification=rule,
        capture_k=2,
        on_finish=finished.append,
    )
    sampling = Sampling(temperature=0.0, stop_ids=(emitted[at],))
    reply = lab.request("a", PROMPT, max_tokens=most, sampling=sampling, top_logprobs=1)
    lab.run(engine, [reply])
    stopped = at < most
    assert reply.tokens == emitted[: min(at + 1, most)]
    assert reply.finish == finished[0].finish == (Finish.STOP if stopped else Finish.LENGTH)
    assert finished[0].output_ids_T.tolist() == reply.tokens
    assert len(reply.logprobs) == len(finished[0].ids_TK) == len(reply.tokens)
    assert engine.stats().output_tokens == len(reply.tokens)


@pytest.mark.parametrize("lookahead", [1, 4, 9])
def test_drafts_stay_within_the_budget(lab: Any, emitted: list[int], lookahead: int) -> None:
    """tf#28555: drafts ran past what was left of the budget.

    With one token left nothing is drafted; with more, at most one draft fewer than are left.
    """
    for most in range(1, 12):
        script = Script({"a": emitted})
        engine = lab.engine(floor=script, lookahead=lookahead)
        (tokens,) = lab.run(engine, [lab.request("a", PROMPT, max_tokens=most)])
        assert tokens == emitted[:most]
        wanted = [count for at, count in script.asked if count]
        assert all(at + count < most for at, count in script.asked)
        assert wanted[:1] == ([min(lookahead, most - 1)] if most > 1 else [])
        assert engine.stats().drafted == sum(wanted)


@pytest.mark.parametrize("drafter", ["copy", "script"])
@pytest.mark.parametrize("room", range(1, BLOCK + 3))
def test_a_full_context_ends_the_output_on_its_last_position(
    lab: Any, room: int, drafter: str
) -> None:
    """turboderp-org/exllamav2#274: 4,092 of 4,096 positions filled and five drafts: an assertion.

    The context here is all the model can read, so that one position more would be seen.
    """
    context = 64
    model = copy.deepcopy(lab.target())
    model.config.max_position_embeddings = context
    prompt = lab.prompts([context - room])[0]
    expected = plain_output(lab, prompt, GREEDY, tokens=room)
    floor = Script({"a": [*expected, *[1] * 20]})
    engine = engine_over(
        model,
        lookahead=LOOKAHEAD,
        max_context=context,
        floor=floor if drafter == "script" else None,
        drafter=lab.drafter("copy") if drafter == "copy" else None,
    )
    reply = lab.request("a", prompt, max_tokens=100)
    lab.run(engine, [reply])
    assert reply.tokens == expected
    assert reply.finish == Finish.LENGTH


def _short_sighted(positions: int) -> DraftModel:
    """A drafter with a table of positions that ends early: reading past it is an IndexError."""
    torch.manual_seed(2)
    config = GPT2Config(
        vocab_size=48, n_embd=32, n_layer=1, n_head=2, n_positions=positions, bos_token_id=None
    )
    model = GPT2LMHeadModel(config)
    model.train(False)
    model.set_attn_implementation("sdpa")
    return DraftModel(model=model, vocab_ids=torch.arange(48), digest=b"short".ljust(32, b"."))


@pytest.mark.parametrize("length", [3, 28, 31, 32, 33, 60])
def test_a_drafter_with_a_short_table_stops_where_it_ends(lab: Any, length: int) -> None:
    """vllm#57941, vllm#24662: past the drafter's own limit the engine died for everybody."""
    engine = lab.engine(drafter=_short_sighted(32), lookahead=4)
    prompt, other = lab.prompts((length, 4))
    replies = [lab.request("a", prompt, max_tokens=14), lab.request("b", other, max_tokens=14)]
    lab.run(engine, replies)
    for reply in replies:
        lab.assert_same(reply, plain_output(lab, reply.request.prompt_ids, GREEDY, tokens=14))
    stats = engine.stats()
    assert (stats.drafter_failed, stats.failed) == (0, 0)
    assert stats.drafted > 0
    assert stats.drafter.startswith(b"short")


def test_a_drafter_reads_as_far_as_it_can_and_no_further(lab: Any) -> None:
    """lmstudio-ai/lmstudio-bug-tracker#499: the drafter kept a smaller context than configured.

    A copy that reads 40 positions fills its blocks up to there, to the position.
    """
    drafter = lab.drafter("copy")
    drafter.model.config.max_position_embeddings = 40
    engine = lab.engine(drafter=drafter, lookahead=3)
    reply = lab.request("a", lab.prompts([20])[0], max_tokens=40)
    lab.run(engine, [reply])
    lab.assert_same(reply, plain_output(lab, reply.request.prompt_ids, GREEDY, tokens=40))
    # Blocks of four from 20 on. At 40 tokens the last one is read and a draft of it would be the
    # 41st, which is only written.
    assert reply.calls[:5] == [4, 4, 4, 4, 4]
    assert sum(count - 1 for count in reply.calls[5:]) <= 1
    whole = lab.engine(drafter="copy", lookahead=3)
    lab.run(whole, [again := lab.request("a", lab.prompts([20])[0], max_tokens=40)])
    assert again.calls == [4] * 10


def _pieces(house: House, path: str, **fields: Any) -> list[str]:
    """The text of every token of a plain stream."""
    house.speculate(0)
    events = house.stream(path, **fields)
    choices = [event["choices"][0] for event in events]
    spoken = [choice for choice in choices if "role" not in choice.get("delta", {})]
    return [piece_of(choice) for choice in spoken if choice["finish_reason"] is None]


def _cut(pieces: list[str], stop: str) -> tuple[str, int]:
    """What is left in front of a stop string, and how many tokens it took to complete it."""
    text = ""
    for count, piece in enumerate(pieces, start=1):
        text += piece
        if stop in text:
            return text[: text.index(stop)], count
    raise AssertionError("the text does not hold the stop string")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("lookahead", [0, LOOKAHEAD, 9])
def test_a_stop_string_cuts_at_every_offset(house: House, path: str, lookahead: int) -> None:
    """tf 5.24 (found here), LostRuins/koboldcpp#1276: a stop string inside a block was noticed at
    the block's end, 12 tokens in place of 3."""
    fields: dict[str, Any] = {**ENDLESS, "max_tokens": 2 * BLOCK + 2}
    pieces = _pieces(house, path, **fields)
    text = "".join(pieces)
    house.speculate(lookahead)
    for start in range(len(text) - 2):
        stop = text[start : start + 2]
        expected, count = _cut(pieces, stop)
        answer = house.ask(path, stop=stop, **fields)
        (choice,) = answer["choices"]
        assert (text_of(choice), choice["finish_reason"]) == (expected, "stop"), (start, stop)
        assert answer["usage"]["completion_tokens"] == count


def test_of_several_stop_strings_the_first_to_be_complete_wins(house: House) -> None:
    """sgl#31599 in text: the earliest end wins, also inside one token and before a limit."""
    fields: dict[str, Any] = {**ENDLESS, "max_tokens": 2 * BLOCK}
    pieces = _pieces(house, COMPLETIONS, **fields)
    text = "".join(pieces)
    late, early = text[9:12], text[4:7]
    expected, count = _cut(pieces, early)
    for most in (count, count + 1, 2 * BLOCK):
        (choice,) = house.answers(
            COMPLETIONS, **{**fields, "stop": [late, early], "max_tokens": most}
        )
        assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
    (choice,) = house.answers(
        COMPLETIONS, **{**fields, "stop": [late, early], "max_tokens": count - 1}
    )
    assert choice["finish_reason"] == "length"
    assert choice["text"] == "".join(pieces[: count - 1])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_nothing_is_streamed_behind_a_stop_and_nothing_held_back_is_lost(
    house: House, path: str
) -> None:
    """tf#47912 and its kin: what was drafted behind the end reached the stream."""
    fields: dict[str, Any] = {**ENDLESS, "max_tokens": 2 * BLOCK}
    pieces = _pieces(house, path, **fields)
    text = "".join(pieces)
    house.speculate(LOOKAHEAD)
    for start in range(0, len(text) - 3, 3):
        stop = text[start : start + 3]
        expected, count = _cut(pieces, stop)
        events = house.stream(path, stop=stop, stream_options={"include_usage": True}, **fields)
        usage = events.pop()["usage"]
        streamed = [event["choices"][0] for event in events]
        assert "".join(piece_of(choice) for choice in streamed) == expected
        assert streamed[-1]["finish_reason"] == "stop"
        assert usage["completion_tokens"] == count
    # A stop string that only begins to come true is text in the end.
    events = house.stream(path, stop=text[-2:] + "\x00", **fields)
    assert "".join(piece_of(event["choices"][0]) for event in events) == text


def test_an_answer_that_ends_by_itself_ends_alike_in_blocks(house: House) -> None:
    """tf#47912, sgl#33758: an EOS in the middle of a block, and a bonus token behind it."""
    offsets = set()
    for number in range(10):
        fields = {"temperature": 0.7, "seed": number, "max_tokens": 60}
        plain, drafted = house.both(CHAT, **fields)
        assert drafted["choices"] == plain["choices"]
        assert drafted["usage"] == plain["usage"]
        (choice,) = drafted["choices"]
        events = house.stream(CHAT, **fields)
        assert "".join(piece_of(event["choices"][0]) for event in events) == text_of(choice)
        assert events[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
        assert "<|" not in text_of(choice)
        if choice["finish_reason"] == "stop":
            offsets.add(drafted["usage"]["completion_tokens"] % BLOCK)
    assert len(offsets) > 2


@pytest.mark.parametrize("lookahead", [0, LOOKAHEAD])
def test_a_stop_token_ends_an_answer_at_every_offset(house: House, lookahead: int) -> None:
    """tf#47912, LostRuins/koboldcpp#1276, HabanaAI/vllm-fork#1435, sgl#33758: every new token is
    looked at, and nothing follows the one that ends the answer.

    Each token of a greedy answer in turn is declared the end.
    """
    house.speculate(lookahead)
    prompt = house.tokenizer("How many rows")["input_ids"]
    written = house.greedy(prompt, 2 * BLOCK + 1)
    for end in dict.fromkeys(written):
        at = written.index(end)
        fields: dict[str, Any] = {"prompt": prompt, "temperature": 0, "ignore_eos": True}
        answer = house.ask(COMPLETIONS, **fields, max_tokens=50, stop_token_ids=[end])
        (choice,) = answer["choices"]
        assert answer["usage"]["completion_tokens"] == at + 1
        assert choice["finish_reason"] == "stop"
        kept = house.tokenizer.decode(written[:at], skip_special_tokens=True)
        assert choice["text"] == kept


def test_an_answer_has_as_many_tokens_as_were_asked_for(house: House) -> None:
    """tf#28555: the last block ran past max_tokens."""
    house.speculate(16)
    for most in range(1, 20):
        answer = house.ask(CHAT, **ENDLESS, max_tokens=most)
        assert answer["usage"]["completion_tokens"] == most
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("room", [1, 2, LOOKAHEAD, BLOCK, BLOCK + 1])
def test_the_last_positions_of_the_context_are_served(house: House, room: int) -> None:
    """turboderp-org/exllamav2#274 over HTTP: the answer fills the context and the node lives."""
    prompt = [5 + index % 200 for index in range(CONTEXT - room)]
    (choice,) = house.answers(COMPLETIONS, prompt=prompt, **ENDLESS, max_tokens=50)
    assert choice["finish_reason"] == "length"
    answer = house.ask(COMPLETIONS, prompt=prompt, **ENDLESS, max_tokens=50)
    assert answer["usage"]["completion_tokens"] == room


def test_an_answer_without_a_limit_fills_the_context_exactly(house: House) -> None:
    """trt#16826: the default limit counted slots that belong to drafts."""
    for lookahead in (0, LOOKAHEAD):
        house.speculate(lookahead)
        usage = house.ask(CHAT, **ENDLESS, max_tokens=None)["usage"]
        assert usage["total_tokens"] == CONTEXT


def test_a_prompt_longer_than_the_drafter_reads_is_answered(house: House) -> None:
    """vllm#24662, vllm#57941 over HTTP: a long prompt crashed the drafter, and the engine too."""
    drafter = copy.deepcopy(house.plain)
    drafter.config.max_position_embeddings = 40
    ids = torch.arange(house.station.node.target.vocab)
    prompt = [5 + index % 200 for index in range(60)]
    house.speculate(0)
    expected = house.ask(COMPLETIONS, prompt=prompt, **ENDLESS)["choices"]
    house.speculate(LOOKAHEAD)
    try:
        house.engine.swap(DraftModel(model=drafter, vocab_ids=ids, digest=b"s" * 32))
        assert house.ask(COMPLETIONS, prompt=prompt, **ENDLESS)["choices"] == expected
        before = house.idle().accepted
        house.ask(COMPLETIONS, **ENDLESS)
        assert house.idle().accepted > before
        assert house.engine.stats().drafter_failed == 0
    finally:
        house.restore()


def test_a_refusal_names_the_context(house: House) -> None:
    """trt#16826: what does not fit is refused with the limit that really holds."""
    body = body_for(COMPLETIONS, prompt=[5] * CONTEXT)
    response = house.station.post(COMPLETIONS, body)
    assert response.status_code == 400
    assert str(CONTEXT) in response.json()["error"]["message"]


@pytest.mark.parametrize("n", [1, 3])
def test_what_is_kept_of_an_answer_ends_where_it_was_cut(
    stations: Callable[..., Any], tiny: TargetModel, n: int
) -> None:
    """sgl#31599, sgl#33758: tokens behind the stop were counted and kept.

    The captured ids of an answer are as many as its usage says, and the stop string is complete
    with the last of them and not before.
    """
    house = House(stations(), tiny.model)
    fields: dict[str, Any] = {**ENDLESS, "max_tokens": 14}
    text = "".join(_pieces(house, COMPLETIONS, store=False, **fields))
    house.speculate(LOOKAHEAD)
    seen = 0
    for start in range(1, 12, 2):
        stop = text[start : start + 2]
        usage = house.ask(COMPLETIONS, stop=stop, n=n, **fields)["usage"]
        traces = [trace for _, trace in house.station.captured()][seen:]
        seen += len(traces)
        assert len(traces) == n
        assert sum(len(trace.output_ids_T) for trace in traces) == usage["completion_tokens"]
        for trace in traces:
            ids = trace.output_ids_T.tolist()
            assert len(trace.topk) == len(trace.how_T) == len(ids)
            written, before = (
                house.tokenizer.decode(part, skip_special_tokens=True) for part in (ids, ids[:-1])
            )
            assert (stop in written) == (trace.finish == Finish.STOP)
            assert stop not in before
        assert any(trace.finish == Finish.STOP for trace in traces)
