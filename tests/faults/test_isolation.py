"""Class E: nobody's answer, speed or work depends on what somebody else sent."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from draftkeep.kernels.sampling import Sampling
from draftkeep.policies.names import alias
from draftkeep.serve.engine.ngram import NgramDrafter
from draftkeep.serve.engine.row import Row
from draftkeep.serve.passes.runner import ModelRunner
from tests.faults.house import CHAT, LOOKAHEAD, House, text_of
from tests.faults.plain import plain_output
from tests.serve.script import Script

SAMPLED = Sampling(temperature=0.9, top_p=0.9)


class _Watched(NgramDrafter):
    """Prompt lookup that must find its proposals in the request's own tokens."""

    def propose(
        self,
        rows: Sequence[Row],
        counts: Sequence[int],
        timed: Callable[[int, Callable[[], None]], None],
    ) -> None:
        super().propose(rows, counts, timed)
        for row in rows:
            assert set(row.drafts) <= set(row.tokens)


@pytest.mark.parametrize("join_at", range(4))
def test_lookup_hits_of_some_requests_leave_the_others_alone(lab: Any, join_at: int) -> None:
    """vllm#14645: where only some of a batch found an n-gram, tokens of one request came out of
    another.

    Requests of disjoint alphabets, so that a stranger's token is a stranger's for sure.
    """
    prompts = [[1, 2, 3] * 5, [40, 41, 42, 43], [20, 21] * 6, [30], [10, 11, 12, 10, 11]]
    engine = lab.engine(floor=_Watched(max_n=3, min_n=1), lookahead=4, slots=3)
    replies = [
        lab.request(str(i), p, max_tokens=14, sampling=SAMPLED, seed=i)
        for i, p in enumerate(prompts)
    ]
    for reply in replies[:2]:
        engine.submit(reply.request)
    for _ in range(join_at):
        engine.step()
    lab.run(engine, replies[2:])
    for index, reply in enumerate(replies):
        lab.assert_same(reply, plain_output(lab, prompts[index], SAMPLED, tokens=14, seed=index))
    assert engine.stats().accepted > 0
    assert engine.stats().drafter_failed == 0


@pytest.mark.parametrize("drafter", ["copy", "noisy", "none"])
def test_one_long_request_beside_four_short_ones(lab: Any, drafter: str) -> None:
    """vllm#46088: beside one long request four short ones got garbage."""
    prompts = lab.prompts((90, 2, 1, 3, 2))
    engine = lab.engine(drafter=drafter, lookahead=3)
    replies = [lab.request(str(i), p, sampling=SAMPLED, seed=i) for i, p in enumerate(prompts)]
    lab.run(engine, replies)
    for index, reply in enumerate(replies):
        lab.assert_same(reply, plain_output(lab, prompts[index], SAMPLED, tokens=16, seed=index))


@pytest.mark.parametrize("drafter", ["copy", "none"])
def test_a_prompt_costs_the_same_whoever_sent_it_before(
    lab: Any, drafter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vllm#53347, microsoft/chunk-attention#3, lcpp#27148: a cache of prefixes tells one caller
    what another sent, or answers from it.

    There is none: the passes for a prompt are the same, shape by shape, before and after somebody
    else sent it, its prefix or something else.
    """
    secret, other = lab.prompts((60, 60))
    engine = lab.engine(drafter=drafter, slots=1)
    passes: list[list[list[tuple[int, int]]]] = []

    engine.step()
    for name in ("forward", "prefill"):
        real = getattr(ModelRunner, name)

        def watched(runner: ModelRunner, segments: Any, real: Any = real) -> Any:
            passes[-1].append([(len(one.tokens), one.start) for one in segments])
            return real(runner, segments)

        monkeypatch.setattr(ModelRunner, name, watched)
    for number, prompt in enumerate([secret, secret, other, secret, secret[:30]]):
        passes.append([])
        lab.run(engine, [lab.request(str(number), prompt, max_tokens=6)])
    assert passes[0] == passes[1] == passes[3]
    assert sum(count for call in passes[0] for count, _ in call) >= 60
    assert engine.stats().prompt_tokens == 60 * 4 + 30


def test_names_joined_in_another_way_are_other_names() -> None:
    """tinfoilsh/confidential-model-router#386: org_1 with 2345 was org_12 with 345."""
    key = b"k" * 32
    assert alias(key, "org-1", b"2345") != alias(key, "org-12", b"345")
    assert len({alias(key, "a" * n, b"a" * (6 - n)) for n in range(7)}) == 7


def test_how_far_is_drafted_for_one_request_is_not_what_another_left(lab: Any) -> None:
    """tf 5.24 (found here): the number of drafts and the threshold lived on the assistant, so that
    one caller's traffic set another's."""
    prompt = lab.prompts([4])[0]
    right = plain_output(lab, prompt, Sampling(temperature=0.0), tokens=16)
    wrong = [(token + 1) % 48 for token in right]
    script = Script({"first": right, "bad": wrong, "again": right})
    engine = lab.engine(floor=script, lookahead=4)
    asked = {}
    for name in script.plans:
        script.asked = []
        lab.run(engine, [lab.request(name, prompt)])
        asked[name] = script.asked
    assert asked["first"] == asked["again"]
    assert asked["bad"] == [(at, min(4, 15 - at)) for at in range(15)]


TENANTS = ("acme", "shy", "open")


def _question(number: int) -> dict[str, Any]:
    """A question of its own length and words, with a canary."""
    text = f"canary{number:02d} " * (1 + number % 5) + "How many rows has the table orders?"
    return {"text": text, "seed": number, "temperature": 0.8, "max_tokens": 24}


def test_sixteen_at_once_get_what_each_gets_alone(house: House) -> None:
    """ml-explore/mlx-lm#965, sgl#4593: answers from the prompts of others under load."""
    house.speculate(LOOKAHEAD)
    alone = [house.ask(CHAT, **_question(number)) for number in range(16)]

    def ask(number: int) -> dict[str, Any]:
        return house.ask(CHAT, tenant=TENANTS[number % 3], **_question(number))

    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(ask, reversed(range(16))))[::-1]
    for number, (one, other) in enumerate(zip(alone, together, strict=True)):
        assert one["choices"] == other["choices"]
        assert one["usage"] == other["usage"]
        text = text_of(other["choices"][0])
        assert not any(f"canary{n:02d}" in text for n in range(16) if n != number)


def test_one_tenant_after_another_in_the_same_slot(house: House) -> None:
    """lcpp#27148, #27422: the conversation before, also another machine's, shone through."""
    house.speculate(LOOKAHEAD)
    first = house.ask(CHAT, tenant="acme", **_question(3))
    for number in (5, 9):
        house.ask(CHAT, tenant="shy", **_question(number))
        assert house.ask(CHAT, tenant="open", **_question(3))["choices"] == first["choices"]


def test_a_salt_of_the_callers_own_means_nothing(house: House) -> None:
    """vllm#53347: a caller wrote the victim's cache salt and measured hits.

    The field is taken for what it is, unknown; no answer speaks of cached tokens.
    """
    plain = house.ask(CHAT, **_question(1))
    for salt in ("victim", "victim", "other"):
        answer = house.ask(CHAT, cache_salt=salt, prompt_cache_key=salt, **_question(1))
        assert answer["choices"] == plain["choices"]
        details = answer["usage"].get("prompt_tokens_details") or {}
        assert not details.get("cached_tokens")
