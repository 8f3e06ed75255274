"""The rules about skips.

A test that asks for a service which this machine lacks is skipped, and the end of the run says so
loudly. Under `--forbid-skips` every skip fails its test instead.
"""

from collections.abc import Generator, Iterable
from typing import Any

import pytest

from tests.services.needs import INSTALL, Need, missing

_NEEDS = "this machine lacks "


def require(needs: Iterable[Need]) -> None:
    """Skip the test where the machine lacks one of `needs`."""
    names = " and ".join(need.name for need in missing(needs))
    if names:
        pytest.skip(_NEEDS + names)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--forbid-skips`, for runs that nobody watches."""
    parser.addoption(
        "--forbid-skips", action="store_true", help="fail every test that would be skipped"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Under `--forbid-skips`, make a failure of a skip. An expected failure is no skip."""
    report = yield
    if (
        item.config.getoption("--forbid-skips")
        and report.skipped
        and not hasattr(report, "wasxfail")
    ):
        report.outcome = "failed"
        report.longrepr = f"skipped under --forbid-skips: {_reason(report)} ({INSTALL})"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same for a module that skips itself."""
    report = yield
    if collector.config.getoption("--forbid-skips") and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped under --forbid-skips: {_reason(report)}"
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """List, at the very end, what was not tested and what would change that."""
    lacking: dict[str, list[str]] = {}
    for report in terminalreporter.stats.get("skipped", []):
        reason = _reason(report)
        if reason.startswith(_NEEDS):
            lacking.setdefault(reason, []).append(report.nodeid)
    if not lacking:
        return
    terminalreporter.section("NOT TESTED", red=True, bold=True)
    for reason, tests in sorted(lacking.items()):
        files = sorted({test.split("::")[0] for test in tests})
        terminalreporter.line(f"{len(tests)} tests: {reason}: {', '.join(files)}", red=True)
    terminalreporter.line(f"Install it: {INSTALL}", red=True, bold=True)


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")
