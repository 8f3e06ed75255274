"""What the engine asks of any drafter, asked of every drafter there is."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from draftkeep.kernels.draw import choose
from draftkeep.kernels.noise import DRAFT, gumbel
from draftkeep.kernels.outcome import Verified
from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine import model_drafter
from draftkeep.serve.engine.drafting import Drafter
from draftkeep.serve.engine.model_drafter import ModelDrafter
from draftkeep.serve.engine.ngram import NgramDrafter
from draftkeep.serve.engine.request import Request
from draftkeep.serve.engine.row import Row
from draftkeep.serve.passes.graphs import FixedPasses
from draftkeep.serve.passes.runner import ModelRunner

VOCAB, CONTEXT, SLOTS = 48, 64, 4
KINDS = ("copy", "trimmed", "noisy", "n-gram")
RULES = ("coupled", "rejection")
# Short endings that come again, so that a look-up finds something.
PROMPTS = ([5, 6, 7, 5, 6], [1, 2] * 9, [9, 9, 9], [3, 4, 3, 4, 3], list(range(20)) * 2)
SAMPLINGS = (
    Sampling(temperature=0.0),
    Sampling(temperature=0.8, top_p=0.9),
    Sampling(temperature=1.0, top_k=12, repetition_penalty=1.2, frequency_penalty=0.3),
    Sampling(temperature=0.7, logit_bias=((5, 3.0), (7, -100.0)), min_p=0.02),
    Sampling(temperature=0.9, eos_ids=(5,), stop_ids=(9,), min_tokens=4),
)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> Any:
    return request.param


def _drafter(lab: Any, kind: str, rule: Any, context: int = CONTEXT) -> Drafter:
    if kind == "n-gram":
        return NgramDrafter(3, 1)
    return ModelDrafter(
        lab.drafter(kind), target_vocab=VOCAB, slots=SLOTS, context=context, packing="never",
        verification=rule,
    )  # fmt: skip


def _engine(lab: Any, kind: str, rule: Any, **options: Any) -> Any:
    if kind == "n-gram":
        return lab.engine(floor=NgramDrafter(3, 1), verification=rule, **options)
    return lab.engine(drafter=kind, verification=rule, **options)


def _row(prompt: Any, slot: int, sampling: Any = SAMPLINGS[1], budget: int = 30) -> Row:
    request = Request(
        request_id=str(slot), prompt_ids=tuple(prompt), sampling=sampling, seed=slot,
        max_tokens=budget, on_tokens=lambda emission: None, on_error=lambda error: None,
    )  # fmt: skip
    row = Row(request, budget=budget, vocab=VOCAB, k=0, submitted_s=0.0, started_s=0.0)
    row.enter(slot, 0.0)
    return row


def _rows(sampling: Any = SAMPLINGS[1]) -> list[Row]:
    return [_row(PROMPTS[slot], slot, sampling) for slot in range(SLOTS)]


def _propose(drafter: Drafter, rows: list[Row], counts: list[int]) -> list[list[int]]:
    passes: list[int] = []

    def timed(batch: int, work: Callable[[], None]) -> None:
        passes.append(batch)
        work()

    for row in rows:
        row.clear_drafts()
        # What `take` does where every earlier draft was rejected.
        row.drafter_len = min(row.drafter_len, len(row.tokens) - 1)
    drafter.propose(rows, counts, timed)
    wanted = sum(count > 0 for count in counts)
    assert all(1 <= batch <= wanted for batch in passes)
    return [list(row.drafts) for row in rows]


def test_drafts_only_for_rows_asked_and_never_more(lab: Any, kind: Any, rule: Any) -> None:
    drafter, rows = _drafter(lab, kind, rule), _rows()
    drafts = _propose(drafter, rows, [3, 0, 1, 5])
    assert drafts[1] == []
    assert all(len(d) <= c for d, c in zip(drafts, [3, 0, 1, 5], strict=True))
    assert sum(map(len, drafts)) > 0
    assert all(0 <= token < VOCAB for d in drafts for token in d)
    assert _propose(drafter, rows, [0, 0, 0, 0]) == [[], [], [], []]


def test_a_law_for_every_draft_under_the_rejection_rule(lab: Any, kind: Any, rule: Any) -> None:
    drafter = _drafter(lab, kind, rule)
    for sampling in SAMPLINGS:
        rows = _rows(sampling)
        for row in rows:
            drafter.forget(row)
        _propose(drafter, rows, [4] * SLOTS)
        for row in rows:
            if rule == "coupled" and kind != "n-gram":
                assert row.draft_laws == []
                continue
            assert len(row.draft_laws) == len(row.drafts)
            certain = kind == "n-gram" or sampling.greedy
            assert all((law is None) == certain for law in row.draft_laws)


@pytest.mark.parametrize("model", ["copy", "trimmed", "noisy"])
@pytest.mark.parametrize("sampling", SAMPLINGS[1:])
def test_a_draft_was_drawn_from_its_law(lab: Any, model: Any, sampling: Any) -> None:
    drafter, rows = _drafter(lab, model, "rejection"), _rows(sampling)
    _propose(drafter, rows, [4] * SLOTS)
    for row in rows:
        for at, (token, law) in enumerate(zip(row.drafts, row.draft_laws, strict=True)):
            assert law is not None
            assert np.exp(law).sum() == pytest.approx(1.0)
            assert token == choose(law, gumbel(row.request.seed, 0, at, VOCAB, DRAFT))


def test_room_is_never_passed(lab: Any, kind: Any, rule: Any) -> None:
    drafter = _drafter(lab, kind, rule, context=24)
    for length in (1, 20, 22, 23, 24, 25, 40):
        row = _row(([5, 6] * 20)[:length], 0)
        drafter.forget(row)
        room = drafter.room(row)
        assert 0 <= room <= row.remaining
        (drafts,) = _propose(drafter, [row], [room])
        assert len(drafts) <= room


def test_a_config_without_a_limit_reads_the_whole_context(lab: Any) -> None:
    draft = lab.drafter("copy")
    # Some families allow None; the config of this one would not take it as an attribute.
    vars(draft.model.config)["max_position_embeddings"] = None
    drafter = ModelDrafter(draft, target_vocab=VOCAB, slots=SLOTS, context=CONTEXT, packing="never")
    assert drafter.context == CONTEXT
    assert any(_propose(drafter, _rows(), [2] * SLOTS))


def test_the_engine_tells_what_a_drafters_passes_survived(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that cannot be captured costs the graphs alone, and is told once."""

    def refused(passes: FixedPasses, width: int, view: int) -> None:
        raise RuntimeError("zebra")

    monkeypatch.setattr(FixedPasses, "_prepare", refused)
    monkeypatch.setattr(model_drafter, "ModelRunner", partial(ModelRunner, graphs="fixed"))
    told: list[tuple[str, type[BaseException]]] = []
    engine = lab.engine(
        drafter="copy", on_problem=lambda kind, error: told.append((kind, type(error)))
    )
    outputs = lab.run(engine, [lab.request("a", PROMPTS[0])])
    assert told == [("a CUDA graph", RuntimeError)]
    assert engine.stats().tested > 0
    assert outputs == lab.run(lab.engine(), [lab.request("a", PROMPTS[0])])


def test_nothing_follows_an_ending_draft(lab: Any, kind: Any, rule: Any) -> None:
    everything = Sampling(temperature=1.0, stop_ids=tuple(range(VOCAB)))
    drafts = _propose(_drafter(lab, kind, rule), _rows(everything), [5] * SLOTS)
    assert {len(d) for d in drafts} <= {0, 1}
    assert sum(map(len, drafts)) > 0


def test_neighbours_do_not_matter(lab: Any, kind: Any, rule: Any) -> None:
    together = _propose(_drafter(lab, kind, rule), _rows(), [4] * SLOTS)
    for slot, row in enumerate(_rows()):
        assert _propose(_drafter(lab, kind, rule), [row], [4]) == [together[slot]]


def test_it_follows_what_was_accepted(lab: Any, kind: Any, rule: Any) -> None:
    """After any steps a row is drafted for as if it had come with those tokens."""
    drafter, rows = _drafter(lab, kind, rule), _rows(Sampling(temperature=0.0))
    for accepted in (0, 1, 3, 0):
        for row in rows:
            row.clear_drafts()
        drafter.propose(rows, [3] * SLOTS, lambda batch, work: work())
        for row in rows:
            kept = row.drafts[: min(accepted, len(row.drafts))]
            verdict = Verified(tokens=(*kept, 5), accepted=len(kept), tested=len(kept))
            row.take(verdict, drafter.digest, 0.0)
    fresh = [_row(row.tokens, row.slot, Sampling(temperature=0.0)) for row in rows]
    expected = _propose(_drafter(lab, kind, rule), fresh, [4] * SLOTS)
    assert _propose(drafter, rows, [4] * SLOTS) == expected


def test_a_forgotten_row_may_change_its_slot(lab: Any, kind: Any, rule: Any) -> None:
    drafter, (row, other) = _drafter(lab, kind, rule), _rows()[:2]
    (expected,) = _propose(drafter, [row], [4])
    drafter.forget(row)
    drafter.forget(row)
    row.park()
    row.enter(other.slot, 1.0)
    assert _propose(drafter, [row], [4]) == [expected]
    other.slot = 0
    drafter.forget(other)
    _propose(drafter, [other], [4])
    assert _propose(drafter, [row], [4]) == [expected]


def test_an_idle_pass_changes_nothing(lab: Any, kind: Any, rule: Any) -> None:
    drafter, rows = _drafter(lab, kind, rule), _rows()
    before = _propose(drafter, rows, [3] * SLOTS)
    drafter.idle_pass(1)
    drafter.idle_pass(SLOTS)
    assert _propose(drafter, rows, [3] * SLOTS) == before
    assert len(drafter.digest) == 32


def _replies(lab: Any, order: Any = range(5), tokens: int = 18) -> Any:
    return [
        lab.request(str(i), PROMPTS[i], max_tokens=tokens, sampling=SAMPLINGS[i], seed=40 + i)
        for i in order
    ]


def _by_name(lab: Any, engine: Any, replies: Any) -> dict[str, list[int]]:
    outputs = lab.run(engine, replies)
    return {r.request.request_id: o for r, o in zip(replies, outputs, strict=True)}


@pytest.mark.parametrize("lookahead", [1, 4])
def test_under_the_coupled_rule_outputs_are_those_without_a_drafter(
    lab: Any, kind: Any, lookahead: Any
) -> None:
    expected = _by_name(lab, lab.engine(), _replies(lab))
    for order in (range(5), (3, 1, 4, 0, 2)):
        replies = _replies(lab, order)
        engine = _engine(lab, kind, "coupled", lookahead=lookahead, slots=3)
        lab.run(engine, replies)
        for reply in replies:
            lab.assert_same(reply, expected[reply.request.request_id])
        assert engine.stats().tested > 0


def test_under_the_rejection_rule_one_seed_gives_one_output(lab: Any, kind: Any) -> None:
    """For one drafter and lookahead, whatever runs beside it; another seed gives another."""
    alone: dict[str, list[int]] = {}
    for index in range(5):
        alone |= _by_name(lab, _engine(lab, kind, "rejection", slots=1), _replies(lab, [index]))
    for order in (range(5), (4, 2, 0, 3, 1)):
        engine = _engine(lab, kind, "rejection", slots=3)
        assert _by_name(lab, engine, _replies(lab, order)) == alone
        assert engine.stats().tested > 0
    greedy = _by_name(lab, lab.engine(), _replies(lab, [0]))
    assert alone["0"] == greedy["0"]
    other = lab.request("1", PROMPTS[1], max_tokens=18, sampling=SAMPLINGS[1], seed=999)
    assert lab.run(_engine(lab, kind, "rejection"), [other])[0] != alone["1"]


def test_barred_ids_never_come_out(lab: Any, kind: Any, rule: Any) -> None:
    """Bias, top-k and min-p hold at every position of a block, drafted or not."""
    sampling = Sampling(temperature=1.3, logit_bias=((5, -100.0), (6, -100.0), (7, -100.0)))
    one = Sampling(temperature=1.3, top_k=1)
    replies = [
        lab.request(f"{i}", prompt, max_tokens=20, sampling=sampling, seed=i)
        for i, prompt in enumerate(PROMPTS)
    ]
    best = lab.request("best", PROMPTS[0], max_tokens=20, sampling=one, seed=1)
    greedy = lab.request("greedy", PROMPTS[0], max_tokens=20)
    engine = _engine(lab, kind, rule)
    lab.run(engine, [*replies, best, greedy])
    assert not {5, 6, 7} & {token for reply in replies for token in reply.tokens}
    assert best.tokens == greedy.tokens
    assert engine.stats().tested > 0


def test_penalties_weigh_on_every_position_of_a_block(lab: Any, kind: Any, rule: Any) -> None:
    """A penalty above every gap between logits lets no token come twice."""
    sampling = Sampling(temperature=0.7, presence_penalty=2.0, frequency_penalty=60.0)
    replies = [
        lab.request(f"{i}", prompt, max_tokens=24, sampling=sampling, seed=i)
        for i, prompt in enumerate(PROMPTS)
    ]
    lab.run(_engine(lab, kind, rule, lookahead=6), replies)
    for reply in replies:
        assert len(set(reply.tokens)) == len(reply.tokens) == 24
