"""Class G: a swap replaces the drafter, all of it and nothing else."""

import copy
from typing import Any, Literal

import pytest
import torch
from torch import nn

from draftkeep.errors import ModelError
from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine.drafting import DraftModel
from draftkeep.serve.engine.engine import Engine
from draftkeep.serve.engine.lookahead import Speculation
from draftkeep.serve.engine.request import StepReport
from tests.faults.house import CHAT, COMPLETIONS, House, copy_of
from tests.faults.plain import engine_over, plain_output

TOKENS = 20
SAMPLINGS = (Sampling(temperature=0.0), Sampling(temperature=0.9), Sampling(top_k=6))


def _replies(lab: Any) -> list[Any]:
    return [
        lab.request(str(i), p, max_tokens=TOKENS, sampling=SAMPLINGS[i], seed=i)
        for i, p in enumerate(lab.prompts((3, 30, 8)))
    ]


def _assert_own(lab: Any, replies: list[Any]) -> None:
    for index, reply in enumerate(replies):
        prompt, sampling = reply.request.prompt_ids, SAMPLINGS[index]
        lab.assert_same(reply, plain_output(lab, prompt, sampling, tokens=TOKENS, seed=index))


class _Reports:
    """Drafts tested and accepted of every drafter, step by step."""

    def __init__(self) -> None:
        self.steps: list[tuple[bytes, int, int]] = []

    def __call__(self, report: StepReport) -> None:
        tested, accepted = (sum(getattr(row, name) for row in report.rows) for name in FIELDS)
        self.steps.append((report.drafter.rstrip(b"."), tested, accepted))


FIELDS = ("tested", "accepted")


@pytest.mark.parametrize("rule", ["coupled", "rejection"])
@pytest.mark.parametrize("between", ["random", "trimmed", "none"])
@pytest.mark.parametrize("step", range(5))
def test_a_drafter_never_reads_what_another_left_in_the_cache(
    lab: Any, step: int, between: str, rule: str
) -> None:
    """InternLM/lmdeploy#4917, #4918, NVIDIA-NeMo/RL#4018, sgl#27718: after an update of weights the
    keys and values of the old ones were read, and only the acceptance fell.

    A copy, then another drafter for two steps, then a copy: every draft of a copy stands.
    """
    reports = _Reports()
    engine = lab.engine(drafter="copy", lookahead=2, on_step=reports, verification=rule)
    replies = _replies(lab)
    for reply in replies:
        engine.submit(reply.request)
    for _ in range(step):
        engine.step()
    engine.swap(lab.drafter(between))
    engine.step()
    engine.step()
    engine.swap(lab.drafter("copy"))
    lab.run(engine, [])
    copies = [(tested, accepted) for name, tested, accepted in reports.steps if name == b"copy"]
    assert len(copies) > 2
    assert all(accepted == tested for tested, accepted in copies)
    assert sum(tested for tested, _ in copies) > 20
    if rule == "coupled":
        _assert_own(lab, replies)


def _too_wide(lab: Any) -> DraftModel:
    model = lab.drafter("random").model
    model.model.layers[1].mlp.up_proj = nn.Linear(33, 48, bias=False)
    return DraftModel(model=model, vocab_ids=torch.arange(48), digest=b"wide" * 8)


def _smaller(lab: Any) -> DraftModel:
    model = lab.drafter("random", vocab=20).model
    return DraftModel(model=model, vocab_ids=torch.arange(20), digest=b"tiny" * 8)


def _cut_head(lab: Any) -> DraftModel:
    model = lab.drafter("random").model
    model.lm_head = nn.Linear(32, 40, bias=False)
    return DraftModel(model=model, vocab_ids=torch.arange(48), digest=b"head" * 8)


def _not_numbers(lab: Any) -> DraftModel:
    model = lab.drafter("random").model
    with torch.no_grad():
        model.model.layers[1].self_attn.o_proj.weight[0, 0] = torch.nan
    return DraftModel(model=model, vocab_ids=torch.arange(48), digest=b"nans" * 8)


@pytest.mark.parametrize("bad", [_too_wide, _smaller, _cut_head, _not_numbers])
@pytest.mark.parametrize("step", [0, 1, 3])
def test_a_refused_drafter_leaves_the_one_that_runs_untouched(
    lab: Any, step: int, bad: Any
) -> None:
    """sgl#2322, #18306, sgl 0.5.23 (found here): a model of another size corrupted the engine, and
    the way back led to the path of the one that had failed.

    Tried in the middle of requests, twice, and then a good one: all or nothing each time.
    """
    reports = _Reports()
    engine = lab.engine(drafter="copy", lookahead=2, on_step=reports)
    replies = _replies(lab)
    for reply in replies:
        engine.submit(reply.request)
    for _ in range(step):
        engine.step()
    for _ in range(2):
        with pytest.raises(ModelError):
            engine.swap(bad(lab))
        engine.step()
    engine.swap(lab.drafter("copy"))
    lab.run(engine, [])
    _assert_own(lab, replies)
    assert {name for name, tested, _ in reports.steps if tested} == {b"copy"}
    assert engine.stats().accepted == engine.stats().tested > 20
    assert engine.stats().drafter_failed == 0


@pytest.mark.parametrize("packing", ["never", "always"])
def test_a_swap_touches_nothing_of_the_target(
    lab: Any, packing: Literal["never", "always"]
) -> None:
    """radixark/miles#1926: a selector meant for the target worked on the frozen drafter as well:
    accept length 2.71 became 1.00, without an error.

    The other way round here: a drafter that shares the target's own embeddings is swapped in, used
    and replaced; the target's passes before and after are the same to the bit.
    """
    target = lab.target()
    model = copy.deepcopy(target)
    engine = Engine(
        model,
        slots=4,
        max_context=128,
        speculation=Speculation(mode="fixed", lookahead=4),
        capture_k=0,
        on_finish=lambda _: None,
        packing=packing,
    )
    probe = lab.request("probe", (3, 1, 4), top_logprobs=20)
    lab.run(engine, [probe])
    for number in range(3):
        drafter = lab.drafter("noisy")
        drafter.model.set_input_embeddings(model.get_input_embeddings())
        engine.swap(drafter)
        lab.run(engine, [lab.request(str(number), (5, number))])
        assert engine.stats().accepted > 0
    engine.swap(None)
    again = lab.request("again", (3, 1, 4), top_logprobs=20)
    lab.run(engine, [again])
    assert again.tokens == probe.tokens
    assert again.logprobs == probe.logprobs
    mine = model.get_input_embeddings().weight
    assert torch.equal(mine, target.get_input_embeddings().weight)


def test_what_a_caller_keeps_of_a_drafter_is_not_what_runs(lab: Any) -> None:
    """sgl#27718: which weights draft is visible, and swapping the same ones again is a swap too."""
    model = lab.target()
    engine = engine_over(model)
    assert engine.stats().drafter == b""
    for digest in (b"a" * 32, b"b" * 32, b"a" * 32):
        drafter = lab.drafter("copy")
        engine.swap(DraftModel(model=drafter.model, vocab_ids=drafter.vocab_ids, digest=digest))
        before = engine.stats().accepted
        lab.run(engine, [lab.request(digest.hex(), (1, 2, 3))])
        assert engine.stats().drafter == digest
        assert engine.stats().accepted > before
    engine.swap(None)
    engine.step()
    assert engine.stats().drafter == b""


def test_answers_while_drafters_come_and_go(house: House) -> None:
    """InternLM/lmdeploy#4917, radixark/miles#1926 over HTTP: swaps under load, and a probe after
    each that every draft of a copy is accepted."""
    house.speculate(5)
    fields: dict[str, Any] = {"temperature": 0.8, "ignore_eos": True, "max_tokens": 30}
    expected = house.ask(CHAT, **fields)["choices"]
    for _ in range(4):
        house.engine.swap(None)
        assert house.ask(CHAT, **fields)["choices"] == expected
        house.restore()
        before = house.idle()
        assert house.ask(CHAT, **fields)["choices"] == expected
        after = house.idle()
        assert after.accepted - before.accepted == after.tested - before.tested > 20


def test_a_drafter_of_another_size_is_refused_and_answers_go_on(house: House) -> None:
    """sgl#2322 over HTTP: an update with another model's weights broke the engine."""
    house.speculate(5)
    fields: dict[str, Any] = {"temperature": 0.8, "ignore_eos": True, "max_tokens": 30}
    expected = house.ask(COMPLETIONS, **fields)["choices"]
    bad = copy_of(house.plain)
    bad.model.lm_head = nn.Linear(bad.model.config.hidden_size, 100, bias=False)
    with pytest.raises(ModelError):
        house.engine.swap(bad)
    before = house.idle()
    assert house.ask(COMPLETIONS, **fields)["choices"] == expected
    after = house.idle()
    assert after.accepted - before.accepted == after.tested - before.tested > 20
