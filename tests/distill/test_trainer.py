"""Runs: repeatable, resumable to the bit, interruptible, and bound by deadlines."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from draftkeep.distill.checkpoint import (
    CHECKPOINT_FILE,
    TrainState,
    load_checkpoint,
    save_checkpoint,
)
from draftkeep.distill.recipe import Recipe
from draftkeep.distill.selection import Opened
from draftkeep.distill.trainer import Trainer, TrainProgress, TrainResult
from draftkeep.errors import ModelError, StoreError
from draftkeep.store.models.drafter import Drafter
from tests.distill.conftest import VOCAB, toy_drafter

STEPS = 12


def _recipe(*, seed: int = 5, steps: int = STEPS, checkpoint_s: float = 1e9) -> Recipe:
    return Recipe(
        learning_rate=5e-3, batch_traces=4, seed=seed, steps=steps, checkpoint_s=checkpoint_s
    )


def _drafter(target: LlamaForCausalLM) -> Drafter:
    return toy_drafter(target, layers=1, vocab_ids=torch.arange(2, VOCAB))


def _weights(drafter: Drafter) -> dict[str, Tensor]:
    return {name: w.clone() for name, w in drafter.model.state_dict().items()}


def _same(left: dict[str, Tensor], right: dict[str, Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(w, right[n]) for n, w in left.items())


def _after(steps: int) -> Callable[[], bool]:
    """A stop that says yes from its call number `steps` on (it is asked before every update)."""
    calls = iter(range(10**6))
    return lambda: next(calls) >= steps


def _train(
    target: LlamaForCausalLM,
    examples: list[Opened],
    directory: Path | None = None,
    *,
    recipe: Recipe | None = None,
    stop: Callable[[], bool] = lambda: False,
    run: str = "a",
) -> tuple[dict[str, Tensor], TrainResult]:
    drafter = _drafter(target)
    trainer = Trainer(
        drafter, list(examples), recipe or _recipe(), run=run, held_out=[], directory=directory
    )
    result = trainer.run(stop=stop)
    return _weights(drafter), result


def test_a_step_budget_and_a_seed_fix_the_result(
    target: LlamaForCausalLM, corpus: list[Opened]
) -> None:
    first, result = _train(target, corpus)
    again, _ = _train(target, corpus)
    other, _ = _train(target, corpus, recipe=_recipe(seed=6))
    assert (result.steps, result.epochs, result.finished) == (STEPS, 1, True)
    assert _same(first, again)
    assert not _same(first, other)


@pytest.mark.parametrize("stops", [(1,), (6,), (7, 2), (0, 11)])
def test_a_stopped_run_goes_on_to_the_very_same_weights(
    target: LlamaForCausalLM, corpus: list[Opened], tmp_path: Path, stops: tuple[int, ...]
) -> None:
    whole, expected = _train(target, corpus)
    for count in stops:
        _, result = _train(target, corpus, tmp_path, stop=_after(count))
        assert not result.finished
    resumed, result = _train(target, corpus, tmp_path)
    assert _same(resumed, whole)
    assert (result.steps, result.epochs, result.loss) == (
        expected.steps,
        expected.epochs,
        expected.loss,
    )


def test_a_finished_run_is_not_trained_further(
    target: LlamaForCausalLM, corpus: list[Opened], tmp_path: Path
) -> None:
    first, _ = _train(target, corpus, tmp_path)
    again, result = _train(target, corpus, tmp_path)
    assert _same(first, again)
    assert result.steps == STEPS


def test_a_checkpoint_of_another_run_is_deleted_and_not_used(
    target: LlamaForCausalLM, corpus: list[Opened], tmp_path: Path
) -> None:
    _train(target, corpus, tmp_path, run="old", stop=_after(6))
    Trainer(_drafter(target), list(corpus), _recipe(), run="new", held_out=[], directory=tmp_path)
    assert not (tmp_path / CHECKPOINT_FILE).exists()
    fresh, _ = _train(target, corpus, tmp_path, run="new")
    assert _same(fresh, _train(target, corpus)[0])


def test_an_interrupt_waits_for_the_update_and_leaves_a_checkpoint(
    target: LlamaForCausalLM, corpus: list[Opened], tmp_path: Path
) -> None:
    before = signal.getsignal(signal.SIGINT)
    trainer = Trainer(
        _drafter(target), list(corpus), _recipe(), run="a", held_out=[], directory=tmp_path
    )

    def interrupt(report: TrainProgress) -> None:
        if report.step == 5:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        trainer.run(progress=interrupt)
    assert signal.getsignal(signal.SIGINT) is before
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert found[0].step == 5
    assert _same(_train(target, corpus, tmp_path)[0], _train(target, corpus)[0])


def test_a_failing_update_keeps_the_checkpoint_before_it(
    target: LlamaForCausalLM, corpus: list[Opened], tmp_path: Path
) -> None:
    drafter = _drafter(target)
    trainer = Trainer(
        drafter,
        list(corpus),
        _recipe(checkpoint_s=0.0),
        run="a",
        held_out=[],
        directory=tmp_path,
    )

    def poison(report: TrainProgress) -> None:
        if report.step == 4:
            with torch.no_grad():
                drafter.model.lm_head.weight.fill_(torch.nan)

    with pytest.raises(ModelError, match="finite number"):
        trainer.run(progress=poison, stop=_after(5))
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert found[0].step == 4


def test_traces_that_may_no_longer_be_read_leave_memory(
    target: LlamaForCausalLM, corpus: list[Opened]
) -> None:
    now = [0.0]
    examples, held_out = list(corpus[:16]), list(corpus[16:])
    keep = {item.header.trace_id for item in [*corpus[:4], *corpus[20:]]}

    def living(items: list[Opened]) -> list[Opened]:
        return [item for item in items if now[0] < 10 or item.header.trace_id in keep]

    trainer = Trainer(
        _drafter(target),
        examples,
        _recipe(),
        run="a",
        held_out=held_out,
        living=lambda items: living(list(items)),
        timer=lambda: now[0],
    )
    sizes = []

    def tick(report: TrainProgress) -> None:
        now[0] += 2.0
        sizes.append((len(examples), len(held_out)))

    result = trainer.run(progress=tick)
    assert result.finished
    assert sizes[0] == (16, 8)
    assert sizes[-1] == (4, 4)
    assert {item.header.trace_id for item in [*examples, *held_out]} == keep


def test_a_run_ends_when_nothing_is_left_to_learn_from(
    target: LlamaForCausalLM, corpus: list[Opened]
) -> None:
    now = [0.0]
    examples = list(corpus[:8])
    trainer = Trainer(
        _drafter(target),
        examples,
        _recipe(),
        run="a",
        held_out=[],
        living=lambda items: [] if now[0] > 5 else list(items),
        timer=lambda: now[0],
    )
    result = trainer.run(progress=lambda report: now.__setitem__(0, now[0] + 2.0))
    assert not result.finished
    assert result.steps < STEPS
    assert examples == []


def test_a_resumed_run_with_fewer_traces_starts_another_pass(
    target: LlamaForCausalLM, corpus: list[Opened], tmp_path: Path
) -> None:
    _train(target, corpus, tmp_path, stop=_after(2))
    _, result = _train(target, corpus[:8], tmp_path)
    # Two updates of the first pass, then five passes of two batches each.
    assert (result.steps, result.epochs) == (STEPS, 5)


def test_training_lowers_the_loss_and_raises_agreement(
    target: LlamaForCausalLM, corpus: list[Opened]
) -> None:
    reports: list[TrainProgress] = []
    trainer = Trainer(
        _drafter(target),
        list(corpus),
        _recipe(steps=150),
        run="a",
        held_out=list(corpus),
        timer=lambda: 20.0 * len(reports),
    )
    result = trainer.run(progress=reports.append)
    agreements = [r.agreement for r in reports if r.agreement is not None]
    assert result.loss < 0.3 * reports[0].loss
    assert agreements[-1] > agreements[0] + 0.15
    assert [r.fraction for r in reports][-1] == 1.0


def test_a_time_budget_ends_the_run(target: LlamaForCausalLM, corpus: list[Opened]) -> None:
    clock = iter(range(10**6))
    recipe = Recipe(learning_rate=1e-3, batch_traces=4, seed=0, seconds=6.0)
    trainer = Trainer(
        _drafter(target),
        list(corpus),
        recipe,
        run="a",
        held_out=[],
        timer=lambda: float(next(clock)),
    )
    result = trainer.run()
    # The timer moves by one at every reading, and an update reads it at its start and its end.
    assert (result.steps, result.seconds, result.finished) == (6, 6.0, True)


def test_a_damaged_checkpoint_is_told_apart_from_none(tmp_path: Path) -> None:
    assert load_checkpoint(tmp_path) is None
    state = TrainState(run="a", inputs="b", step=3, loss=0.5)
    save_checkpoint(tmp_path, state, {"weight.x": torch.ones(2)})
    found = load_checkpoint(tmp_path)
    assert found is not None
    assert found[0] == state
    data = (tmp_path / CHECKPOINT_FILE).read_bytes()
    for damaged in (b"", data[:20], b"x" * len(data), data.replace(b"draftkeep", b"draftkeeq")):
        (tmp_path / CHECKPOINT_FILE).write_bytes(damaged)
        with pytest.raises(StoreError, match="delete it"):
            load_checkpoint(tmp_path)
