"""A whole job on a toy: real keys, log, shards, catalog, gate and registry.

The timer is a counter, so a budget in seconds is a budget in updates.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from draftkeep.distill.job import run_job
from draftkeep.distill.progress import JobProgress
from draftkeep.distill.result import JobResult, JobStatus
from draftkeep.distill.workspace import load_plans, only_job
from draftkeep.errors import BusyError, ConfigError
from draftkeep.ingest.trace import Provenance, Trace
from draftkeep.policies.signing import SigningKey
from draftkeep.store.drafter import load_drafter
from draftkeep.store.erasure import erase_subject
from draftkeep.store.schema import jobs, lineage
from tests.distill.conftest import TTL_S, Deployment

SCOPE = "tenant:acme"


@pytest.fixture
def filled(deployment: Deployment, traffic: list[Trace]) -> Deployment:
    """160 traces of 80 people; about eight of them are held out."""
    deployment.fill(traffic, subjects=80)
    return deployment


def _run(deployment: Deployment, **changes: Any) -> JobResult:
    ticks = iter(range(10**9))
    values: dict[str, Any] = {
        "tenant": "acme",
        "clock": deployment.clock,
        "timer": lambda: float(next(ticks)),
    }
    return run_job(deployment.config, **(values | changes))


def _with(deployment: Deployment, **distill: Any) -> Deployment:
    changed = deployment.config.distill.model_copy(update=distill)
    config = deployment.config.model_copy(update={"distill": changed})
    return replace(deployment, config=config)


def _state(deployment: Deployment, job_id: str) -> tuple[str, bool, dict[str, Any]]:
    with deployment.catalog.read() as connection:
        row = connection.execute(sa.select(jobs).where(jobs.c.id == job_id)).one()
    return row.state, row.contaminated, row.record


def _drafters(deployment: Deployment) -> list[Path]:
    return sorted((deployment.config.state_dir / "drafters").glob("*"))


def _left_over(deployment: Deployment) -> list[Path]:
    return [path for path, _ in load_plans(deployment.config.state_dir / "jobs")]


def test_a_job_learns_from_traffic_and_its_drafter_serves(filled: Deployment) -> None:
    reports: list[JobProgress] = []
    result = _run(filled, progress=reports.append)
    assert result.status is JobStatus.ADMITTED
    assert result.drafter is not None
    assert result.before is not None
    assert result.after is not None
    assert result.after.replay_acceptance > result.before.replay_acceptance + 0.1
    assert filled.registry.channel(SCOPE, "stable") == result.drafter
    gate = SigningKey.load(filled.config.keys_path / "gate.key")
    drafter = load_drafter(filled.registry.path(result.drafter), gate_public=gate.public)
    assert drafter.manifest.target == filled.target.target_fingerprint.hex()
    assert drafter.manifest.measures["replay"] == pytest.approx(result.after.replay_acceptance)
    assert drafter.manifest.lineage["traces"] == result.counts["training_traces"]
    state, contaminated, record = _state(filled, result.job_id)
    assert (state, contaminated, record["status"]) == ("done", False, "admitted")
    assert _left_over(filled) == []
    assert list(dict.fromkeys(report.stage for report in reports)) == [
        "select",
        "baseline",
        "train",
        "evaluate",
    ]


def test_lineage_names_whom_it_learned_from_and_nobody_else(filled: Deployment) -> None:
    result = _run(filled)
    with filled.catalog.read() as connection:
        rows = connection.execute(sa.select(lineage)).all()
    assert {row.drafter for row in rows} == {result.drafter}
    assert sum(row.positions for row in rows) == result.counts["training_positions"]
    learned = {(row.alias, row.period_id) for row in rows}
    for number in range(80):
        (pair,) = filled.keyring.aliases_of("acme", f"user-{number:03d}")
        period_id, alias = pair
        held_out = filled.sealer.held_out(_provenance(filled, number))
        assert ((alias, period_id) in learned) is not held_out


def _provenance(deployment: Deployment, number: int) -> Provenance:
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


def test_the_result_is_plain_json(filled: Deployment) -> None:
    result = _run(filled)
    values = json.loads(json.dumps(result.as_json(), allow_nan=False))
    assert values["admitted"] is True
    assert values["drafter"] == (result.drafter or b"").hex()
    assert values["replay"]["sql"]["after"] > values["replay"]["sql"]["before"]
    assert values["skipped"] == {}


def test_the_next_job_starts_from_what_serves(filled: Deployment) -> None:
    first = _run(filled)
    second = _run(filled)
    assert second.parent == first.drafter
    assert second.before is not None
    assert first.after is not None
    assert second.before.replay_acceptance == first.after.replay_acceptance
    if second.status is JobStatus.REFUSED:
        assert filled.registry.channel(SCOPE, "stable") == first.drafter


def test_a_candidate_that_is_no_better_leaves_nothing_behind(filled: Deployment) -> None:
    result = _run(_with(filled, learning_rate=1e-12))
    assert result.status is JobStatus.REFUSED
    assert result.gate is not None
    assert "not_better" in result.gate.reasons
    assert filled.registry.channel(SCOPE, "stable") is None
    assert _drafters(filled) == []
    assert _left_over(filled) == []
    assert _state(filled, result.job_id)[0] == "done"


def test_a_stopped_job_is_resumed_by_the_next_call(filled: Deployment) -> None:
    calls = iter(range(10**9))
    stopped = _run(filled, stop=lambda: next(calls) >= 40)
    assert stopped.status is JobStatus.INTERRUPTED
    assert _state(filled, stopped.job_id)[0] == "running"
    assert [path.name for path in _left_over(filled)] == [stopped.job_id]
    # Traces that came meanwhile wait for the next job.
    resumed = _run(filled)
    assert resumed.job_id == stopped.job_id
    assert resumed.status is JobStatus.ADMITTED
    assert resumed.measures["train_steps"] == 150
    assert _left_over(filled) == []


@pytest.mark.parametrize("change", [{"seed": 9}, {"layers": 2}, {"vocab": 18}])
def test_a_stopped_job_of_another_configuration_is_dropped(
    filled: Deployment, change: dict[str, Any]
) -> None:
    calls = iter(range(10**9))
    stopped = _run(filled, stop=lambda: next(calls) >= 5)
    fresh = _run(_with(filled, **change))
    assert fresh.job_id != stopped.job_id
    state, _, record = _state(filled, stopped.job_id)
    assert (state, record) == ("failed", {"status": "dropped"})
    assert _left_over(filled) == []


def _erase_when(
    deployment: Deployment, when: Callable[[JobProgress], bool], subject: str
) -> Callable[[JobProgress], None]:
    """A progress callback that erases a subject once, in the middle of the job."""
    done = []

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


def _learner_of(deployment: Deployment) -> str:
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
        lambda report: report.train is not None and report.train.step == 60,
        lambda report: report.train is not None and report.fraction == 1.0,
        lambda report: report.stage == "evaluate",
        lambda report: report.stage == "evaluate" and report.fraction == 1.0,
    ],
    ids=["selecting", "training", "last update", "evaluating", "judging"],
)
def test_an_erasure_during_a_job_leaves_nothing_of_it(
    filled: Deployment, moment: Callable[[JobProgress], bool]
) -> None:
    result = _run(filled, progress=_erase_when(filled, moment, _learner_of(filled)))
    assert result.status is JobStatus.CONTAMINATED
    assert result.drafter is None
    assert filled.registry.channel(SCOPE, "stable") is None
    assert filled.registry.list() == ()
    assert _drafters(filled) == []
    assert _left_over(filled) == []
    assert _state(filled, result.job_id)[:2] == ("failed", True)
    clean = _run(filled)
    assert clean.status is JobStatus.ADMITTED
    assert clean.skipped == {"erased": 2}


def test_a_stopped_job_that_learned_from_an_erased_subject_is_not_resumed(
    filled: Deployment,
) -> None:
    calls = iter(range(10**9))
    stopped = _run(filled, stop=lambda: next(calls) >= 40)
    erase_subject(
        filled.catalog,
        filled.keyring,
        tenant="acme",
        subject=_learner_of(filled),
        now_s=filled.clock(),
    )
    fresh = _run(filled)
    assert fresh.job_id != stopped.job_id
    assert fresh.status is JobStatus.ADMITTED
    assert _state(filled, stopped.job_id)[:2] == ("failed", True)


def test_a_deadline_during_training_ends_it(filled: Deployment) -> None:
    def progress(report: JobProgress) -> None:
        if report.train is not None and report.train.step == 20:
            filled.clock.now_s += TTL_S

    result = _run(filled, progress=progress)
    assert result.status is JobStatus.TOO_FEW_TRACES
    assert 20 <= result.measures["train_steps"] < 25
    assert _left_over(filled) == []
    assert _drafters(filled) == []


def test_a_channel_that_moved_meanwhile_is_left_alone(filled: Deployment) -> None:
    first = _run(filled)
    registry = filled.registry

    def progress(report: JobProgress) -> None:
        if report.stage == "evaluate":
            registry.set_channel(SCOPE, "stable", None, at_s=filled.clock())

    better = _with(filled, learning_rate=2e-2, seed=3, gate_margin=1.0)
    result = _run(better, progress=progress)
    assert first.status is JobStatus.ADMITTED
    assert result.status in (JobStatus.SUPERSEDED, JobStatus.REFUSED)
    assert registry.channel(SCOPE, "stable") is None


def test_too_few_traces_is_an_answer_and_not_an_error(
    deployment: Deployment, traffic: list[Trace]
) -> None:
    assert _run(deployment).status is JobStatus.TOO_FEW_TRACES
    deployment.fill(traffic[:15], subjects=15)
    result = _run(deployment)
    assert result.status is JobStatus.TOO_FEW_TRACES
    assert result.as_json()["replay"] == {}


def test_one_job_at_a_time(filled: Deployment) -> None:
    with (
        only_job(filled.config.state_dir / "jobs"),
        pytest.raises(BusyError, match="another distillation job"),
    ):
        _run(filled)


def test_an_unknown_tenant_is_refused(filled: Deployment) -> None:
    with pytest.raises(ConfigError, match=r"no tenant 'nobody'"):
        _run(filled, tenant="nobody")
