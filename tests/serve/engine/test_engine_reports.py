"""Every decoding step is reported once, and the reports add up to what was delivered."""

from typing import Any

import pytest

from draftkeep.kernels.sampling import Sampling
from draftkeep.serve.engine import decode_step
from draftkeep.serve.engine.request import Finished, StepReport
from draftkeep.serve.engine.verification import target_pass
from draftkeep.serve.passes.runner import ModelRunner

PROMPTS = (3, 17, 1, 8)


def _run(lab: Any, drafter: Any, **options: Any) -> Any:
    reports: list[StepReport] = []
    finished: list[Finished] = []
    engine = lab.engine(
        drafter=drafter,
        slots=2,
        lookahead=3,
        on_step=reports.append,
        on_finish=finished.append,
        **options,
    )
    sampling = Sampling(temperature=0.9, eos_ids=(5,), stop_ids=(9,))
    replies = [
        lab.request(str(i), p, max_tokens=14, sampling=sampling, seed=i, group=f"g{i % 2}")
        for i, p in enumerate(lab.prompts(PROMPTS))
    ]
    lab.run(engine, replies)
    return engine, reports, finished, replies


@pytest.mark.parametrize("drafter", ["none", "copy", "noisy", "random"])
def test_reports_counters_and_requests_tell_one_story(lab: Any, drafter: Any) -> None:
    engine, reports, finished, replies = _run(lab, drafter)
    stats = engine.stats()
    rows = [row for report in reports for row in report.rows]
    assert stats.steps == len(reports)
    assert stats.row_steps == len(rows) == sum(f.steps for f in finished)
    assert stats.output_tokens == sum(row.emitted for row in rows)
    assert stats.output_tokens == sum(len(reply.tokens) for reply in replies)
    assert stats.drafted == sum(row.drafted for row in rows)
    assert stats.tested == sum(row.tested for row in rows) == sum(f.tested for f in finished)
    assert stats.accepted == sum(row.accepted for row in rows) == sum(f.accepted for f in finished)
    assert sum(row.first for row in rows) == len(replies)
    for group in ("g0", "g1"):
        expected = sum(len(r.tokens) for r in replies if r.request.group == group)
        assert sum(row.emitted for row in rows if row.group == group) == expected
    for row in rows:
        assert row.accepted <= row.tested <= row.drafted <= 3
        assert row.tested - row.accepted <= 1
        assert 1 <= row.emitted <= row.accepted + 1
    for report in reports:
        drafted = any(row.drafted for row in report.rows)
        assert report.width == 1 if drafter == "none" else report.width <= 4
        assert report.drafter.rstrip(b".") == (drafter.encode() if drafted else b"")


@pytest.mark.parametrize("at", range(6))
def test_drafts_behind_the_end_are_not_counted(lab: Any, at: Any) -> None:
    """A copy drafts blocks of five; the output ends inside the first one."""
    prompt = (35, 40, 5, 46)
    tokens = lab.run(lab.engine(), [lab.request("a", prompt, max_tokens=8)])[0]
    assert len(set(tokens)) == 8
    reports: list[StepReport] = []
    engine = lab.engine(drafter="copy", lookahead=5, on_step=reports.append)
    sampling = Sampling(temperature=0.0, stop_ids=(tokens[at],))
    reply = lab.request("a", prompt, max_tokens=30, sampling=sampling)
    lab.run(engine, [reply])
    row = reports[0].rows[0]
    expected = min(at + 1, 5)
    assert (row.emitted, row.drafted, row.tested, row.accepted) == (at + 1, *[expected] * 3)
    assert engine.stats().drafted == engine.stats().tested == expected
    assert engine.stats().output_tokens == at + 1


def test_times_are_the_engines_clock(lab: Any, clock: Any, monkeypatch: Any) -> None:
    """Passes that take 3 s and 2 s by the clock; what is between them belongs to neither."""
    reports: list[StepReport] = []
    finished: list[Finished] = []
    engine = lab.engine(
        drafter="copy",
        lookahead=2,
        slots=1,
        clock=clock,
        on_step=reports.append,
        on_finish=finished.append,
    )
    engine.step()

    forward = ModelRunner.forward

    def drafting(runner: ModelRunner, segments: Any) -> Any:
        clock.now_s += 2.0
        return forward(runner, segments)

    def verifying(runner: ModelRunner, rows: Any) -> Any:
        clock.now_s += 1.0
        return target_pass(runner, rows)

    # Every pass is one of a runner's, and the target's are those of `target_pass` as well.
    monkeypatch.setattr(ModelRunner, "forward", drafting)
    monkeypatch.setattr(decode_step, "target_pass", verifying)
    first, second = lab.request("a", (1, 2, 3), max_tokens=6), lab.request("b", (4,), max_tokens=1)
    submitted_s = clock.now_s
    for reply in (first, second):
        engine.submit(reply.request)
    lab.run(engine, [])
    assert [(r.draft_s, r.verify_s, r.total_s) for r in reports] == [
        (4.0, 3.0, 7.0),
        (4.0, 3.0, 7.0),
        (0.0, 3.0, 3.0),
    ]
    gaps = [(row.first, row.gap_s, row.emitted) for r in reports for row in r.rows]
    assert gaps == [(True, 7.0, 3), (False, 7.0, 3), (True, 17.0, 1)]
    a, b = finished
    assert (a.submitted_s, a.started_s, a.first_s, a.finished_s) == tuple(
        submitted_s + seconds for seconds in (0.0, 0.0, 7.0, 14.0)
    )
    assert (b.submitted_s, b.started_s, b.first_s, b.finished_s) == tuple(
        submitted_s + seconds for seconds in (0.0, 14.0, 17.0, 17.0)
    )


def test_a_report_that_raises_is_counted_and_dropped(lab: Any) -> None:
    def broken(report: Any) -> None:
        raise OSError("the disk is full")

    engine = lab.engine(drafter="copy", on_step=broken)
    reply = lab.request("a", (1, 2), max_tokens=9)
    lab.run(engine, [reply])
    assert len(reply.tokens) == 9
    assert engine.stats().callback_failed == engine.stats().steps > 0


def test_stats_say_how_full_the_slots_are(lab: Any) -> None:
    engine = lab.engine(slots=4, max_context=100)
    assert engine.stats().kv_used_share == 0.0
    for index in range(2):
        engine.submit(lab.request(str(index), [1] * 21, max_tokens=50).request)
    for _ in range(10):
        engine.step()
    assert engine.stats().kv_used_share == 2 * (21 + 9) / 400
    assert engine.stats().verification == "coupled"
    assert engine.stats().decoder == "fused"
    lab.run(engine, [])
    assert engine.stats().kv_used_share == 0.0
