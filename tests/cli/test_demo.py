"""The demo on the toy model, through the command line, as a newcomer runs it."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.serve.station import wait_for

# Two whole demos in the first test, on a machine that may be busy.
pytestmark = pytest.mark.timeout(900)

DEMO = [sys.executable, "-m", "draftkeep", "demo", "--model", "tiny", "--state-dir"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A state directory in which the demo was interrupted once and then finished."""
    state_dir = tmp_path_factory.mktemp("demo") / "state"
    _interrupt_in(state_dir, "round-1.jsonl")
    done = subprocess.run([*DEMO, str(state_dir)], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-2000:]
    return state_dir, done.stdout


def _interrupt_in(state_dir: Path, journal: str) -> None:
    """Press Ctrl-C, as a terminal does, for the whole group once a round has begun."""
    process = subprocess.Popen(
        [*DEMO, str(state_dir)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        # A job in a shell's background ignores Ctrl-C, and its children would.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    path = state_dir / "demo" / journal
    for _ in range(1500):
        if process.poll() is not None or (path.exists() and path.stat().st_size):
            break
        time.sleep(0.1)
    assert process.poll() is None, "the demo ended before it could be interrupted"
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(60) == 130
    live = json.loads((state_dir / "demo" / "round-1-live.json").read_text())
    answered = sum(counts["requests"] for counts in live.values())
    assert answered == len(path.read_text().splitlines())


def _report(finished: tuple[Path, str]) -> dict[str, object]:
    report: dict[str, object] = json.loads((finished[0] / "report.json").read_text())
    return report


def test_the_report_has_every_figure(finished: tuple[Path, str]) -> None:
    report = _report(finished)
    domains = report["domains"]
    assert isinstance(domains, dict)
    assert set(domains) == {"sql", "arithmetic", "code"}
    for row in domains.values():
        assert set(row) == {
            "replay_before",
            "replay_after",
            "live_before",
            "live_after",
            "tokens_per_step",
        }
    for name in ("speedup", "bytes_per_position", "elapsed_s"):
        assert isinstance(report[name], float), name


def test_the_drafter_learned_from_its_traffic(finished: tuple[Path, str]) -> None:
    domains = _report(finished)["domains"]
    assert isinstance(domains, dict)
    assert domains["sql"]["replay_after"] - domains["sql"]["replay_before"] >= 0.40


def test_the_erased_person_is_gone(finished: tuple[Path, str]) -> None:
    erased = _report(finished)["erased"]
    assert isinstance(erased, dict)
    assert erased["traces"] > 0
    assert erased["opened_after"] == 0
    assert erased["rows_removed"] == erased["traces"]


def test_speculation_changed_no_answer(finished: tuple[Path, str]) -> None:
    speed = _report(finished)["speed"]
    assert isinstance(speed, dict)
    assert speed["identical_answers"] == speed["prompts"]


def test_a_picture_is_left(finished: tuple[Path, str]) -> None:
    assert (finished[0] / "report.png").read_bytes().startswith(b"\x89PNG")


def test_nothing_secret_is_logged(finished: tuple[Path, str]) -> None:
    state_dir, output = finished
    logged = (state_dir / "serve.log").read_text() + output
    for key in ("api.key", "admin.key"):
        assert (state_dir / "demo" / key).read_text() not in logged
    assert "user-0" not in logged
    assert "CREATE TABLE" not in logged


def test_a_finished_demo_is_shown_again_at_once(finished: tuple[Path, str]) -> None:
    again = subprocess.run(
        [*DEMO, str(finished[0])], capture_output=True, text=True, timeout=60, check=True
    )
    assert "already finished" in again.stdout


def test_another_model_is_refused_in_a_used_directory(finished: tuple[Path, str]) -> None:
    other = [*DEMO, str(finished[0]), "--model", "smollm2"]
    refused = subprocess.run(other, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert "--fresh" in refused.stderr
    assert _report(finished)["model"] == "tiny"


def test_a_second_demo_in_a_directory_is_refused_and_deletes_nothing(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    running = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(running, fcntl.LOCK_EX)
    second = subprocess.run(
        [*DEMO, str(tmp_path), "--fresh"], capture_output=True, text=True, timeout=60, check=False
    )
    os.close(running)
    assert second.returncode == 2
    assert "another demo runs" in second.stderr
    assert (tmp_path / "demo").is_dir()


@pytest.mark.parametrize("ends", [signal.SIGTERM, signal.SIGHUP])
def test_a_demo_that_is_told_to_end_leaves_no_server(tmp_path: Path, ends: signal.Signals) -> None:
    """As when its terminal closes: nobody presses Ctrl-C, and it alone hears of it."""
    demo = subprocess.Popen(
        [*DEMO, str(tmp_path)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(ends, signal.SIG_DFL),
    )
    try:
        wait_for(lambda: (tmp_path / "serve.json").exists() or demo.poll() is not None)
        demo.send_signal(ends)
        assert demo.wait(120) == 130
    finally:
        demo.kill()
    with (tmp_path / "serve.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_server_that_was_left_behind_is_named_and_keeps_its_address(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "serve.json").write_text('{"url": "http://127.0.0.1:1"}')
    with (tmp_path / "serve.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        refused = subprocess.run(
            [*DEMO, str(tmp_path)], capture_output=True, text=True, timeout=120, check=False
        )
    assert refused.returncode == 2
    assert "another serving node uses" in refused.stderr
    assert (tmp_path / "serve.json").exists()


def test_fresh_refuses_a_directory_it_did_not_make(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    refused = subprocess.run(
        [*DEMO, str(tmp_path), "--fresh"], capture_output=True, text=True, timeout=60, check=False
    )
    assert refused.returncode == 2
    assert "not made by the demo" in refused.stderr
    assert (tmp_path / "thesis.txt").exists()
