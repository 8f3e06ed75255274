"""The outage: how long to wait, and what is said."""

import logging

import pytest

from draftkeep.outage import REMIND_S, Outage


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """Level and text of what was logged since the last look."""
    lines = [(record.levelno, record.getMessage()) for record in caplog.records]
    caplog.clear()
    return lines


def test_the_pause_doubles_up_to_its_limit_and_ends_with_the_outage() -> None:
    outage = Outage("moving", first_s=1.0, longest_s=5.0)
    assert outage.pause_s == 0
    pauses = []
    for now_s in range(5):
        outage.failed("no way", now_s)
        pauses.append(outage.pause_s)
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]
    outage.worked(5.0)
    assert outage.pause_s == 0
    outage.failed("no way", 6.0)
    assert outage.pause_s == 1.0


def test_it_is_said_at_once_now_and_then_and_when_it_is_over(
    caplog: pytest.LogCaptureFixture,
) -> None:
    outage = Outage("moving")
    outage.worked(0.0)
    assert said(caplog) == []
    outage.failed("no bridge", 10.0)
    assert said(caplog) == [(logging.ERROR, "moving fails and is tried again: no bridge")]
    outage.failed("no road", 10.0 + REMIND_S - 1)
    assert said(caplog) == []
    outage.failed("no road", 10.0 + REMIND_S)
    assert said(caplog) == [(logging.ERROR, "moving fails and is tried again: no road")]
    outage.failed("no road", 11.0 + REMIND_S)
    assert said(caplog) == []
    outage.worked(30.0 + REMIND_S)
    assert said(caplog) == [
        (logging.WARNING, f"moving works again, after {20 + REMIND_S:.0f} s"),
    ]
    outage.worked(31.0 + REMIND_S)
    assert said(caplog) == []
    outage.failed("no bridge", 32.0 + REMIND_S)
    assert said(caplog) == [(logging.ERROR, "moving fails and is tried again: no bridge")]
