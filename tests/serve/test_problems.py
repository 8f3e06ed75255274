"""Problems are logged by kind: often enough to be seen, seldom enough to be read."""

import logging

import pytest

from draftkeep.serve.problems import EVERY_S, ProblemLog


def test_each_kind_is_logged_once_a_second_with_what_was_held_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now_s = 0.0
    log = ProblemLog(clock=lambda: now_s)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            log.problem("capture", RuntimeError("zebra-canary-77"))
            log.drop("queue_full")
        log.problem("capture", MemoryError())
        now_s = EVERY_S
        log.problem("capture", RuntimeError())
        log.problem("capture", RuntimeError())
    assert caplog.messages == [
        "capture failed with RuntimeError",
        "a trace was dropped: queue_full",
        "capture failed with MemoryError",
        "capture failed with RuntimeError (4 more since the last line)",
    ]
