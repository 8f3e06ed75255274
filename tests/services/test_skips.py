"""What a run says about tests that it could not run."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

TESTS = """
import pytest
from tests.services.skips import require
from tests.services.needs import Need

def nowhere():
    return None

@pytest.fixture
def abacus():
    require([Need(name="an abacus", find=nowhere, packages=("abacus",))])

def test_counts(abacus):
    raise AssertionError("never runs")

def test_counts_twice(abacus):
    raise AssertionError("never runs")

@pytest.mark.xfail(strict=True)
def test_expected_to_fail():
    raise AssertionError

def test_passes():
    pass
"""


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (directory / "test_abacus.py").write_text(TESTS)
    (directory / "conftest.py").write_text('pytest_plugins = ["tests.services.skips"]')
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, directory],
        cwd=directory,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
    )


def test_the_end_of_a_run_lists_what_was_not_tested(tmp_path: Path) -> None:
    answer = run(tmp_path, "-n1")
    assert answer.returncode == 0
    _, listed = answer.stdout.split("NOT TESTED")
    assert "2 tests: this machine lacks an abacus: test_abacus.py" in listed
    assert "Install it: make services" in listed


def test_a_skip_fails_where_skips_are_forbidden(tmp_path: Path) -> None:
    answer = run(tmp_path, "-n1", "--forbid-skips")
    assert answer.returncode == 1
    assert "1 passed, 1 xfailed, 2 errors" in answer.stdout
    assert "this machine lacks an abacus" in answer.stdout
