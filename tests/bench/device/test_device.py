"""The device's checks hold on a processor, and one that does not is named and yields no row."""

from typing import Any

import pytest
import torch

from bench.device import __main__ as device
from bench.device import timing
from bench.results import RESULTS_DIR, Row

CPU = torch.device("cpu")


def test_every_check_holds_on_a_processor(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(timing, "REPEATS", 1)
    rows, failed = device.run(device.CHECKS, CPU, full=False)
    assert failed == []
    names = [row.metric for row in rows]
    assert len(names) == len(set(names))
    assert {"topk_lse_ratio", "forward_kl_ratio", "noise_row_ms", "pass_8x5_ratio"} < set(names)
    assert names[-1] == "engine_copy_drafter_ratio"
    assert all(row.value > 0 for row in rows)
    assert capsys.readouterr().out.count("\n") == len(rows)


def test_a_check_that_does_not_hold_is_named_and_the_others_go_on(capsys: Any) -> None:
    def wrong(where: torch.device, *, full: bool) -> list[Row]:
        timing.close("two numbers", torch.ones(2), torch.tensor([1.0, 1.5]), 0.1)
        return [Row(metric="never", value=1.0, unit="")]

    def right(where: torch.device, *, full: bool) -> list[Row]:
        return [Row(metric="reached", value=1.0, unit="")]

    rows, failed = device.run((wrong, right), CPU, full=False)
    assert ([row.metric for row in rows], failed) == (["reached"], ["wrong"])
    assert "FAILED wrong: two numbers differ by 0.5, allowed 0.1" in capsys.readouterr().out


def test_the_script_runs_this_bench() -> None:
    script = (RESULTS_DIR.parent / "gpu.sh").read_text()
    assert "-m bench.device --device cuda --full" in script
