"""A whole job on a toy: real keys, log, shards, catalog, gate and registry.

The timer is a counter, so a budget in seconds is a budget in updates.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import torch
from transformers import LlamaForCausalLM

from draftkeep.distill.evaluate import evaluate
from draftkeep.distill.job import run_job
from draftkeep.distill.progress import JobProgress
from draftkeep.distill.result import JobResult, JobStatus
from draftkeep.distill.resume import drop_contaminated
from draftkeep.distill.selection import list_sealed, open_all
from draftkeep.distill.workspace import load_plans, only_job
from draftkeep.errors import BusyError, ConfigError
from draftkeep.ingest.codec import decode_bodies
from draftkeep.ingest.tables import only_identity
from draftkeep.ingest.trace import Provenance, Trace
from draftkeep.kernels.sampling import Sampling
from draftkeep.policies.signing import SigningKey
from draftkeep.store.anchors import GATE, read_anchor
from draftkeep.store.erasure import erase_subject
from draftkeep.store.models.drafter import cold_drafter, load_drafter, save_drafter
from draftkeep.store.schema import jobs, lineage
from tests.deployment import TTL_S
from tests.distill.conftest import EOS, VOCAB, Workshop, deploy, serve

SCOPE = "tenant:acme"


@dataclass(frozen=True)
class _Finished:
    deployment: Workshop
    result: JobResult
    stages: list[str]


@pytest.fixture(scope="module")
def finished(
    tmp_path_factory: pytest.TempPathFactory,
    target_dir: Path,
    traffic: list[Trace],
    model_cache: None,
) -> Iterator[_Finished]:
    """One whole job; the tests that use it only look."""
    with deploy(tmp_path_factory.mktemp("finished"), target_dir) as made:
        made.fill(traffic, subjects=80)
        reports: list[JobProgress] = []
        result = _run(made, progress=reports.append)
        stages = list(dict.fromkeys(report.stage for report in reports))
        yield _Finished(deployment=made, result=result, stages=stages)


def _run(deployment: Workshop, **changes: Any) -> JobResult:
    ticks = iter(range(10**9))
    values: dict[str, Any] = {
        "tenant": "acme",
        "clock": deployment.clock,
        "timer": lambda: float(next(ticks)),
    }
    return run_job(deployment.config, **(values | changes))


def _after(updates: int) -> Callable[[], bool]:
    """A stop that lets so many updates pass."""
    calls = iter(range(10**9))
    return lambda: next(calls) >= updates


def _with(deployment: Workshop, **distill: Any) -> Workshop:
    changed = deployment.config.distill.model_copy(update=distill)
    config = deployment.config.model_copy(update={"distill": changed})
    return replace(deployment, config=config)


def _state(deployment: Workshop, job_id: str) -> tuple[str, bool, dict[str, Any]]:
    with deployment.catalog.read() as connection:
        row = connection.execute(sa.select(jobs).where(jobs.c.id == job_id)).one()
    return row.state, row.contaminated, row.record


def _drafters(deployment: Workshop) -> list[Path]:
    return sorted((deployment.config.state_dir / "drafters").glob("*"))


def _left_over(deployment: Workshop) -> list[Path]:
    return [path for path, _ in load_plans(deployment.config.state_dir / "jobs")]


def test_a_job_learns_from_traffic_and_its_drafter_serves(finished: _Finished) -> None:
    world, result = finished.deployment, finished.result
    assert result.status is JobStatus.ADMITTED
    assert result.drafter is not None
    assert result.before is not None
    assert result.after is not None
    assert result.after.replay_acceptance > result.before.replay_acceptance + 0.1
    assert world.registry.channel(SCOPE, "stable") == result.drafter
    gate = SigningKey.load(world.config.keys_path / "gate.key")
    drafter = load_drafter(world.registry.path(result.drafter), gate_public=gate.public)
    assert drafter.manifest.target == world.target.target_fingerprint.hex()
    assert drafter.manifest.measures["replay"] == pytest.approx(result.after.replay_acceptance)
    assert drafter.manifest.lineage["traces"] == result.counts["training_traces"]
    state, contaminated, record = _state(world, result.job_id)
    assert (state, contaminated, record["status"]) == ("done", False, "admitted")
    assert _left_over(world) == []
    assert finished.stages == ["select", "baseline", "train", "evaluate"]


def test_sampled_traces_without_noise_train_and_judge_a_drafter(
    deployment: Workshop, target: LlamaForCausalLM
) -> None:
    sampling = Sampling(temperature=0.5, top_p=0.95, eos_ids=(EOS,))
    prompts = [[3 + n % 3, 4 + n % 2, 3 + n % 4, 3 + n % 5] for n in range(160)]
    traces = [
        serve(target, prompt, sampling=sampling, max_tokens=10, seed=n, noise_known=False)
        for n, prompt in enumerate(prompts)
    ]
    deployment.fill(traces, subjects=80)
    first = _run(deployment)
    assert first.status is JobStatus.ADMITTED
    assert first.before is not None
    assert first.after is not None
    assert len(first.after.scores) == first.counts["held_out_traces"] > 0
    assert first.after.replay_acceptance > first.before.replay_acceptance + 0.1
    assert first.after.walk.tokens_per_step > first.before.walk.tokens_per_step
    assert deployment.registry.channel(SCOPE, "stable") == first.drafter
    # One that learned next to nothing is no better, and the gate says so.
    second = _run(_with(deployment, learning_rate=1e-12))
    assert second.status is JobStatus.REFUSED
    assert second.gate is not None
    assert "not_better" in second.gate.reasons
    assert "too_few_requests" not in second.gate.reasons


def test_what_it_published_replays_as_it_was_judged(finished: _Finished) -> None:
    world, result = finished.deployment, finished.result
    assert result.drafter is not None
    assert result.after is not None
    gate_public = read_anchor(world.config.state_dir, GATE)
    drafter = load_drafter(world.registry.path(result.drafter), gate_public=gate_public)
    sealed = list_sealed(
        world.catalog,
        world.storage,
        tenant="acme",
        target=world.target.target_fingerprint,
        now_s=world.clock(),
    )
    found = open_all(
        sealed,
        opener=world.opener(),
        decode=lambda bodies: decode_bodies(bodies, only_identity),
        target=world.target,
    )
    again = evaluate(drafter, found.held_out, context=1024, lookahead=result.after.lookahead)
    assert again == result.after


def test_lineage_names_whom_it_learned_from_and_nobody_else(finished: _Finished) -> None:
    world, result = finished.deployment, finished.result
    with world.catalog.read() as connection:
        rows = connection.execute(sa.select(lineage)).all()
    assert {row.drafter for row in rows} == {result.drafter}
    assert sum(row.positions for row in rows) == result.counts["training_positions"]
    learned = {(row.alias, row.period_id) for row in rows}
    for number in range(80):
        ((period_id, alias),) = world.keyring.aliases_of("acme", f"user-{number:03d}")
        held_out = world.sealer.held_out(_provenance(world, number))
        assert ((alias, period_id) in learned) is not held_out


def test_the_result_is_plain_json(finished: _Finished) -> None:
    values = json.loads(json.dumps(finished.result.as_json(), allow_nan=False))
    assert values["admitted"] is True
    assert values["drafter"] == (finished.result.drafter or b"").hex()
    assert values["replay"]["sql"]["after"] > values["replay"]["sql"]["before"]
    assert values["skipped"] == {}


def _provenance(deployment: Workshop, number: int) -> Provenance:
    return Provenance(
        tenant="acme",
        subject=f"user-{number:03d}",
        response_id=bytes(16),
        domain=None,
        consent=0,
        policy_version=1,
        created_s=int(deployment.clock()),
        target=bytes(32),
        tokenizer=bytes(32),
    )


def test_the_next_job_starts_from_what_serves_and_must_beat_it(filled: Workshop) -> None:
    first = _run(filled)
    second = _run(_with(filled, learning_rate=1e-12))
    assert second.parent == first.drafter
    assert second.before is not None
    assert first.after is not None
    assert second.before.replay_acceptance == first.after.replay_acceptance
    # It learned next to nothing, so it is refused and leaves nothing behind.
    assert second.status is JobStatus.REFUSED
    assert second.gate is not None
    assert "not_better" in second.gate.reasons
    assert filled.registry.channel(SCOPE, "stable") == first.drafter
    assert len(_drafters(filled)) == 1
    assert _left_over(filled) == []
    assert _state(filled, second.job_id)[0] == "done"


def test_a_stopped_job_is_resumed_by_the_next_call(filled: Workshop) -> None:
    stopped = _run(filled, stop=_after(20))
    assert stopped.status is JobStatus.INTERRUPTED
    assert _state(filled, stopped.job_id)[0] == "running"
    assert [path.name for path in _left_over(filled)] == [stopped.job_id]
    resumed = _run(filled)
    assert resumed.job_id == stopped.job_id
    assert resumed.status is JobStatus.ADMITTED
    assert resumed.measures["train_steps"] == 50
    assert _left_over(filled) == []


@pytest.mark.parametrize("change", [{"seed": 9}, {"layers": 2}, {"vocab": 18}])
def test_a_stopped_job_of_another_configuration_is_dropped(
    filled: Workshop, change: dict[str, Any]
) -> None:
    stopped = _run(filled, stop=_after(2))
    fresh = _run(_with(filled, **change), stop=_after(2))
    assert fresh.job_id != stopped.job_id
    state, _, record = _state(filled, stopped.job_id)
    assert (state, record) == ("failed", {"status": "dropped"})
    assert [path.name for path in _left_over(filled)] == [fresh.job_id]


def _erase_when(
    deployment: Workshop, when: Callable[[JobProgress], bool], subject: str
) -> Callable[[JobProgress], None]:
    """A progress callback that erases a subject once, in the middle of the job."""
    done: list[bool] = []

    def progress(report: JobProgress) -> None:
        if not done and when(report):
            done.append(True)
            erase_subject(
                deployment.catalog,
                deployment.keyring,
                tenant="acme",
                subject=subject,
                now_s=deployment.clock(),
            )

    return progress


def _learner_of(deployment: Workshop) -> str:
    """A subject that is not held out."""
    return next(
        f"user-{number:03d}"
        for number in range(80)
        if not deployment.sealer.held_out(_provenance(deployment, number))
    )


@pytest.mark.parametrize(
    "moment",
    [
        lambda report: report.stage == "select" and report.fraction > 0.5,
        lambda report: report.train is not None and report.train.step == 30,
        lambda report: report.train is not None and report.fraction == 1.0,
        lambda report: report.stage == "evaluate",
        lambda report: report.stage == "evaluate" and report.fraction == 1.0,
    ],
    ids=["selecting", "training", "last update", "evaluating", "judging"],
)
def test_an_erasure_during_a_job_leaves_nothing_of_it(
    filled: Workshop, moment: Callable[[JobProgress], bool]
) -> None:
    result = _run(filled, progress=_erase_when(filled, moment, _learner_of(filled)))
    assert result.status is JobStatus.CONTAMINATED
    assert result.drafter is None
    assert filled.registry.channel(SCOPE, "stable") is None
    assert filled.registry.list() == ()
    assert _drafters(filled) == []
    assert _left_over(filled) == []
    assert _state(filled, result.job_id)[:2] == ("failed", True)


def test_a_stopped_job_that_learned_from_an_erased_subject_is_not_resumed(
    filled: Workshop,
) -> None:
    stopped = _run(filled, stop=_after(20))
    jobs_dir = filled.config.state_dir / "jobs"
    assert drop_contaminated(filled.catalog, jobs_dir) == 0
    erase_subject(
        filled.catalog,
        filled.keyring,
        tenant="acme",
        subject=_learner_of(filled),
        now_s=filled.clock(),
    )
    with only_job(jobs_dir):
        assert drop_contaminated(filled.catalog, jobs_dir) == 0
    assert len(_left_over(filled)) == 1
    assert drop_contaminated(filled.catalog, jobs_dir) == 1
    assert _left_over(filled) == []
    fresh = _run(filled)
    assert fresh.job_id != stopped.job_id
    assert fresh.status is JobStatus.ADMITTED
    assert fresh.skipped == {"erased": 2}
    assert _state(filled, stopped.job_id)[:2] == ("failed", True)


def test_a_deadline_during_training_ends_it(filled: Workshop) -> None:
    def progress(report: JobProgress) -> None:
        if report.train is not None and report.train.step == 20:
            filled.clock.now_s += TTL_S

    result = _run(filled, progress=progress)
    assert result.status is JobStatus.TOO_FEW_TRACES
    assert 20 <= result.measures["train_steps"] < 25
    assert _left_over(filled) == []
    assert _drafters(filled) == []


def test_a_channel_that_moved_meanwhile_is_left_alone(filled: Workshop) -> None:
    other = cold_drafter(filled.target, layers=1, vocab=VOCAB)
    drafters_dir = filled.config.state_dir / "drafters"
    digest = save_drafter(other, drafters_dir, created_s=0)
    gate = SigningKey.load_or_create(filled.config.keys_path / "gate.key")
    registry = filled.registry
    registry.register(digest, scope=SCOPE, inputs=(), at_s=filled.clock())
    registry.admit(digest, gate.sign)

    def progress(report: JobProgress) -> None:
        if report.stage == "evaluate":
            registry.set_channel(SCOPE, "stable", digest, at_s=filled.clock())

    result = _run(filled, progress=progress)
    assert result.status is JobStatus.SUPERSEDED
    assert registry.channel(SCOPE, "stable") == digest


def test_too_few_traces_is_an_answer_and_not_an_error(
    deployment: Workshop, traffic: list[Trace]
) -> None:
    assert _run(deployment).status is JobStatus.TOO_FEW_TRACES
    deployment.fill(traffic[:15], subjects=15)
    result = _run(deployment)
    assert result.status is JobStatus.TOO_FEW_TRACES
    assert result.as_json()["replay"] == {}


def test_a_job_uses_as_many_threads_as_configured(deployment: Workshop) -> None:
    before = torch.get_num_threads()
    changed = deployment.config.model.model_copy(update={"threads": before + 1})
    config = deployment.config.model_copy(update={"model": changed})
    try:
        _run(replace(deployment, config=config))
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_one_job_at_a_time(deployment: Workshop) -> None:
    with (
        only_job(deployment.config.state_dir / "jobs"),
        pytest.raises(BusyError, match="another distillation job"),
    ):
        _run(deployment)


def test_an_unknown_tenant_is_refused(deployment: Workshop) -> None:
    with pytest.raises(ConfigError, match=r"no tenant 'nobody'"):
        _run(deployment, tenant="nobody")
