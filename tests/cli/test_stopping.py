"""A wish to end reaches whoever waits for it, wherever the signal found them."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ENV = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}

# The signal comes while `Event.wait` holds the event's lock, on its way into `Condition.wait`.
IN_THE_MIDDLE = """
import signal, sys, threading
from draftkeep.cli.stopping import stop_event

def interrupt(frame, what, _argument):
    if what == "call" and frame.f_code is threading.Condition.wait.__code__:
        sys.setprofile(None)
        signal.raise_signal(signal.{name})

with stop_event() as stop:
    sys.setprofile(interrupt)
    sys.exit(0 if stop.wait(60) else 1)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
def test_a_signal_in_the_middle_of_a_wait_ends_it(name: str) -> None:
    command = [sys.executable, "-c", IN_THE_MIDDLE.format(name=name)]
    # One that waits for its own lock would never end.
    assert subprocess.run(command, env=ENV, timeout=60).returncode == 0


def test_a_second_signal_ends_the_process_as_ever() -> None:
    code = """
import signal
from draftkeep.cli.stopping import stop_event

with stop_event() as stop:
    signal.raise_signal(signal.SIGTERM)
    assert stop.wait(60)
    signal.raise_signal(signal.SIGTERM)
"""
    done = subprocess.run([sys.executable, "-c", code], env=ENV, timeout=60)
    assert done.returncode == -signal.SIGTERM
