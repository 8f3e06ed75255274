"""Class B: penalties, filters and seeds hold at every position of a block."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine.ngram import NgramDrafter
from draftkeep.serve.engine.request import Finished, How
from tests.faults.house import CHAT, COMPLETIONS, House, text_of
from tests.faults.plain import plain_output
from tests.serve.script import Script

VOCAB = 48
BLOCK = 6
ENDLESS: dict[str, Any] = {"ignore_eos": True, "max_tokens": 30}
PENALISED = {
    "presence": Sampling(temperature=0.0, presence_penalty=1.5),
    "frequency": Sampling(temperature=0.0, frequency_penalty=0.8),
    "rewarded": Sampling(temperature=0.0, frequency_penalty=-0.6),
    "repetition": Sampling(temperature=0.0, repetition_penalty=1.6),
    "sampled": Sampling(
        temperature=1.2, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.4
    ),
}
FILTERED = {
    "temperature": Sampling(temperature=0.4),
    "top-k": Sampling(top_k=5),
    "top-p": Sampling(top_p=0.4),
    "min-p": Sampling(min_p=0.2),
    "bias": Sampling(logit_bias=((3, 3.0), (11, -100.0))),
    "presence": Sampling(presence_penalty=1.0),
    "frequency": Sampling(frequency_penalty=0.7),
    "repetition": Sampling(repetition_penalty=1.5),
    "minimum": Sampling(eos_ids=(2,), stop_ids=(7,), min_tokens=12),
    "all": Sampling(temperature=1.4, top_k=9, top_p=0.8, min_p=0.02, presence_penalty=0.3),
}


def _scripted(
    lab: Any,
    plan: Any,
    sampling: Sampling,
    prompt: Any,
    *,
    seed: int = 0,
    rule: str = "coupled",
) -> tuple[Any, Any]:
    """One request whose drafts follow `plan`."""
    engine = lab.engine(floor=Script({"a": plan}), lookahead=BLOCK, verification=rule)
    reply = lab.request("a", prompt, max_tokens=len(plan), sampling=sampling, seed=seed)
    lab.run(engine, [reply])
    return engine, reply


@pytest.mark.parametrize("wrong", [*range(BLOCK), None])
@pytest.mark.parametrize(
    ("name", "rule"),
    [(name, "coupled") for name in PENALISED]
    + [(name, "rejection") for name in PENALISED if PENALISED[name].greedy],
)
def test_every_accepted_token_is_penalised_and_no_rejected_one(
    lab: Any, name: str, rule: str, wrong: int | None
) -> None:
    """sgl#33643, osaurus-ai/vmlx-swift#357: of a block only the last token was counted, rejected
    drafts were counted too, and accepted ones twice."""
    sampling, prompt = PENALISED[name], (9, 4, 4, 30)
    expected = plain_output(lab, prompt, sampling, tokens=20, seed=5)
    plan = list(expected)
    for at in range(wrong, len(plan), BLOCK) if wrong is not None else ():
        plan[at] = (plan[at] + 7) % VOCAB
    engine, reply = _scripted(lab, plan, sampling, prompt, seed=5, rule=rule)
    assert reply.tokens == expected
    if wrong is None:
        assert engine.stats().accepted == engine.stats().tested > 0
    else:
        assert reply.calls[0] == wrong + 1


@pytest.mark.parametrize("least", range(1, 2 * BLOCK))
def test_min_tokens_counts_tokens_and_not_steps(lab: Any, least: int) -> None:
    """sgl#33643: with several tokens a step the minimum was reached too late, or never."""
    prompt = (35, 40, 5, 46)
    free = plain_output(lab, prompt, Sampling(temperature=0.0), tokens=3)
    sampling = Sampling(temperature=0.0, eos_ids=tuple(free), min_tokens=least)
    expected = plain_output(lab, prompt, sampling, tokens=20)
    _, reply = _scripted(lab, [*expected, *[0] * 20][:20], sampling, prompt)
    assert reply.tokens == expected
    assert len(reply.tokens) > least or reply.tokens[-1] in free


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_two_requests_of_one_sampling_value_share_no_counts(lab: Any, rule: str) -> None:
    """osaurus-ai/vmlx-swift#357: a penalty's counts were one object for everybody."""
    sampling = Sampling(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.5)
    prompts = lab.prompts((3, 8, 5, 1))
    engine = lab.engine(drafter="noisy", lookahead=4, verification=rule)
    replies = [lab.request(str(i), p, sampling=sampling) for i, p in enumerate(prompts)]
    lab.run(engine, replies)
    for reply, prompt in zip(replies, prompts, strict=True):
        lab.assert_same(reply, plain_output(lab, prompt, sampling, tokens=16))


@pytest.mark.parametrize("drafter", ["copy", "constant", "trimmed"])
@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_barred_token_appears_nowhere_in_a_block(lab: Any, drafter: str, rule: str) -> None:
    """sgl#10617: a bias of -100 and min_p held for the first token of a block alone."""
    prompt = lab.prompts([5])[0]
    liked = set(plain_output(lab, prompt, Sampling(temperature=0.0), tokens=16))
    bias = tuple(sorted((token, -100.0) for token in liked | {0}))
    for sampling in (
        Sampling(temperature=0.0, logit_bias=bias),
        Sampling(temperature=1.0, logit_bias=bias, min_p=0.3),
    ):
        engine = lab.engine(drafter=drafter, lookahead=BLOCK, verification=rule)
        replies = [lab.request(str(s), prompt, sampling=sampling, seed=s) for s in range(4)]
        for tokens in lab.run(engine, replies):
            assert not set(tokens) & (liked | {0})


@pytest.mark.parametrize("at", range(BLOCK))
def test_a_barred_draft_is_rejected_wherever_it_stands(lab: Any, at: int) -> None:
    """sgl#10617 with a drafter that insists on the barred token."""
    prompt = lab.prompts([5])[0]
    sampling = Sampling(temperature=1.0, logit_bias=((13, -100.0),))
    expected = plain_output(lab, prompt, sampling, tokens=12, seed=2)
    plan = list(expected)
    plan[at] = 13
    engine, reply = _scripted(lab, plan, sampling, prompt, seed=2)
    assert reply.tokens == expected
    assert engine.stats().tested - engine.stats().accepted == 1


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("name", FILTERED)
def test_drafts_pass_through_the_requests_own_filters(lab: Any, name: str, rule: str) -> None:
    """vllm#56724, tf#40976: drafts outside the request's top-k or top-p never stand a chance.

    A copy of the target that is filtered alike proposes what the target takes, without exception.
    """
    engine = lab.engine(drafter="copy", lookahead=4, verification=rule)
    replies = [
        lab.request(str(i), p, sampling=FILTERED[name], seed=i)
        for i, p in enumerate(lab.prompts((4, 11, 2)))
    ]
    lab.run(engine, replies)
    assert engine.stats().tested > 15
    assert engine.stats().accepted == engine.stats().tested
    if rule == "coupled":
        for index, reply in enumerate(replies):
            prompt, sampling = reply.request.prompt_ids, FILTERED[name]
            lab.assert_same(reply, plain_output(lab, prompt, sampling, tokens=16, seed=index))


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
def test_a_seed_fixes_the_text_at_a_high_temperature(lab: Any, rule: str) -> None:
    """vllm#6038, #6034: with speculation one seed gave another text every time."""
    prompt = lab.prompts([6])[0] * 2
    sampling = Sampling(temperature=2.0)
    for options in ({"drafter": "noisy"}, {"floor": NgramDrafter(max_n=3, min_n=1)}):
        engine = lab.engine(lookahead=4, verification=rule, **options)
        texts = set()
        for attempt in range(4):
            request = lab.request(str(attempt), prompt, sampling=sampling, seed=77)
            texts.add(tuple(lab.run(engine, [request])[0]))
        other = lab.request("other", prompt, sampling=sampling, seed=78)
        assert len(texts) == 1
        assert tuple(lab.run(engine, [other])[0]) not in texts


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("join_at", range(5))
def test_a_seed_holds_whatever_the_neighbours_do(lab: Any, rule: str, join_at: int) -> None:
    """vllm#51226, #10863: beside a request without a seed, one with a seed changed or broke.

    The neighbour joins at every step of the first request, in either order of submission. Under
    the ratio test the blocks are kept alike, as a block's shape is part of that rule's draw.
    """
    sampling, seeded = Sampling(temperature=1.0, top_p=0.9), lab.prompts([7])[0]

    def run(neighbours: int, *, first: bool) -> list[int]:
        engine = lab.engine(drafter="noisy", lookahead=3, slots=4, verification=rule)
        reply = lab.request("seeded", seeded, max_tokens=16, sampling=sampling, seed=11)
        others = [
            lab.request(f"n{i}", p, max_tokens=9, sampling=sampling, seed=1000 + 37 * join_at + i)
            for i, p in enumerate(lab.prompts((3, 12, 1))[:neighbours])
        ]
        if first:
            engine.submit(reply.request)
            for _ in range(join_at):
                engine.step()
            lab.run(engine, others)
        else:
            for other in others:
                engine.submit(other.request)
            for _ in range(join_at):
                engine.step()
            lab.run(engine, [reply])
        tokens: list[int] = reply.tokens
        return tokens

    alone = run(0, first=True)
    for neighbours in (1, 3):
        assert run(neighbours, first=True) == alone
        assert run(neighbours, first=False) == alone


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("at", range(1, 2 * BLOCK + 2))
def test_a_stop_inside_a_block_takes_the_state_back_with_it(lab: Any, rule: str, at: int) -> None:
    """microsoft/onnxruntime-genai#2528: after a stop inside a block, random state and telemetry
    stood where the whole block would have left them.

    The same request, ended after every number of tokens: text, counts and how each token came about
    are a prefix of the full run's, and the next request in the slot is what it always was.
    """
    sampling, prompt = Sampling(temperature=0.9), lab.prompts([4])[0]
    tokens = 2 * BLOCK + 2

    def run(cut: int) -> tuple[Finished, list[int], Any]:
        finished: list[Finished] = []
        engine = lab.engine(
            drafter="noisy",
            lookahead=BLOCK - 1,
            slots=1,
            verification=rule,
            capture_k=3,
            on_finish=finished.append,
        )
        first = lab.request("a", prompt, max_tokens=tokens, sampling=sampling, seed=5)
        request, tell = first.request, first.request.on_tokens

        def on_tokens(emission: Any) -> None:
            tell(emission)
            if len(first.tokens) >= cut:
                engine.end("a", cut)

        object.__setattr__(request, "on_tokens", on_tokens)
        second = lab.request("b", prompt, max_tokens=10, sampling=sampling, seed=6)
        lab.run(engine, [first, second])
        return finished[0], second.tokens, engine.stats()

    whole, after, _ = run(tokens + 1)
    cut, after_cut, stats = run(at)
    assert after_cut == after
    assert cut.output_ids_T.tolist() == whole.output_ids_T[:at].tolist()
    assert cut.how_T.tolist() == whole.how_T[:at].tolist()
    assert cut.ids_TK.tolist() == whole.ids_TK[:at].tolist()
    assert sum(use.positions for use in cut.drafters) == at
    how = cut.how_T.tolist()
    assert cut.accepted == how.count(How.ACCEPTED)
    assert cut.tested == cut.accepted + how.count(How.CORRECTED)
    assert stats.output_tokens == at + len(after)


def test_a_frequency_penalty_counts_in_an_answer(house: House) -> None:
    """vllm#18902: -2 and +2 gave one text under speculation, without a word."""
    texts = {}
    for penalty in (-2, 0, 2):
        (choice,) = house.answers(CHAT, temperature=0, frequency_penalty=penalty, **ENDLESS)
        texts[penalty] = house.tokenizer(text_of(choice))["input_ids"]
    assert len({tuple(ids) for ids in texts.values()}) == 3
    assert len(set(texts[-2])) < len(set(texts[2]))


def test_min_tokens_in_an_answer(house: House) -> None:
    """sgl#33643: the minimum is one of tokens, in every block."""
    plain = house.ask(CHAT, temperature=0, max_tokens=60)
    usual = plain["usage"]["completion_tokens"]
    assert plain["choices"][0]["finish_reason"] == "stop"
    for least in (usual, usual + 1, usual + 4):
        plain, drafted = house.both(CHAT, temperature=0, max_tokens=60, min_tokens=least)
        assert drafted["choices"] == plain["choices"]
        assert drafted["usage"]["completion_tokens"] > least - (least == usual)


def test_a_bias_and_min_p_hold_in_every_block_of_an_answer(house: House) -> None:
    """sgl#10617: a token with a bias of -100 came out of a drafted block all the same."""
    (choice,) = house.answers(COMPLETIONS, temperature=0, **ENDLESS)
    liked = house.tokenizer(text_of(choice))["input_ids"]
    bias = {str(token): -100 for token in set(liked)}
    for fields in ({"temperature": 0}, {"temperature": 1.0, "min_p": 0.3}):
        answer = house.answers(COMPLETIONS, logit_bias=bias, **fields, **ENDLESS)
        got = house.tokenizer(text_of(answer[0]))["input_ids"]
        assert got
        assert text_of(answer[0]) != text_of(choice)
        assert not set(got) & set(liked)


def test_a_seed_fixes_an_answer_at_temperature_2(house: House) -> None:
    """vllm#6038: four requests of one seed at temperature 2 gave four answers."""
    house.speculate(5)
    answers = [house.ask(CHAT, temperature=2, seed=7, **ENDLESS) for _ in range(4)]
    assert len({text_of(answer["choices"][0]) for answer in answers}) == 1
    assert house.answers(CHAT, temperature=2, seed=7, **ENDLESS) == answers[0]["choices"]


def test_seeded_and_unseeded_requests_side_by_side(house: House) -> None:
    """vllm#10863, #51226: a mixed batch ruined one of its requests; a seed held only alone."""
    house.speculate(5)
    # Hot and long: two draws are never the same text.
    fields = {**ENDLESS, "temperature": 2, "max_tokens": 40}
    alone = house.ask(CHAT, **fields, seed=3)["choices"]

    def ask(number: int) -> list[Any]:
        seed = {"seed": 3} if number % 2 == 0 else {"seed": None}
        choices: list[Any] = house.ask(CHAT, **fields, **seed)["choices"]
        return choices

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, range(8)))
    assert all(choices == alone for choices in answers[::2])
    unseeded = {text_of(choices[0]) for choices in answers[1::2]}
    assert len(unseeded | {text_of(alone[0])}) == 5
