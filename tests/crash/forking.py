"""A warm process that forks children on request and kills them, and the caller's side of it.

A child is at work within milliseconds, since everything is imported already. Requests come as JSON
lines on stdin, one answer each on stdout:

    {"start": KIND, ...}   {"pid": ...}
    {"kill": PID}          SIGKILL, then how it ended
    {"look": PID}          {} while it lives, {"stopped": ...} after a SIGSTOP, then how it ended

How it ended is {"signal": ...} or {"exit": ...}; these and a stop come with the child's mark. Ends
at end of file.

The warm process may not start a thread: a forked child has only the thread that forked it.
"""

import json
import mmap
import os
import random
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Child:
    """What a child gets: its request, randomness of its own, and one byte that outlives it."""

    request: Mapping[str, Any]
    draw: random.Random
    mark: mmap.mmap


class _Nursery:
    """The children that live, and their marks."""

    def __init__(self, kinds: Mapping[str, Callable[[Child], None]]) -> None:
        self._kinds = kinds
        self._marks: dict[int, mmap.mmap] = {}

    def start(self, request: Mapping[str, Any], seed: int) -> dict[str, int]:
        child = Child(request=request, draw=random.Random(seed), mark=mmap.mmap(-1, 1))
        pid = os.fork()
        if pid == 0:
            _be(self._kinds[request["start"]], child)
        self._marks[pid] = child.mark
        return {"pid": pid}

    def end(self, pid: int, *, kill: bool) -> dict[str, int]:
        if kill:
            os.kill(pid, signal.SIGKILL)
        found, status = os.waitpid(pid, 0 if kill else os.WNOHANG | os.WUNTRACED)
        if found == 0:
            return {}
        mark = self._marks[pid][0]
        if os.WIFSTOPPED(status):
            return {"stopped": os.WSTOPSIG(status), "mark": mark}
        del self._marks[pid]
        if os.WIFSIGNALED(status):
            return {"signal": os.WTERMSIG(status), "mark": mark}
        return {"exit": os.WEXITSTATUS(status), "mark": mark}

    def close(self) -> None:
        for pid in list(self._marks):
            self.end(pid, kill=True)


def _be(kind: Callable[[Child], None], child: Child) -> None:
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        kind(child)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def serve_forks(
    kinds: Mapping[str, Callable[[Child], None]], ready: Mapping[str, Any], *, seed: int = 0
) -> None:
    """Answer requests until stdin ends, then kill what lives. `ready` is said first.

    A child that returns or raises ends with exit status 1. `seed` and the number of the request
    decide what it draws.
    """
    nursery = _Nursery(kinds)
    print(json.dumps(ready), flush=True)
    try:
        for number, line in enumerate(sys.stdin):
            request = json.loads(line)
            if "start" in request:
                answer = nursery.start(request, (seed << 32) + number)
            elif "kill" in request:
                answer = nursery.end(request["kill"], kill=True)
            else:
                answer = nursery.end(request["look"], kill=False)
            print(json.dumps(answer), flush=True)
    finally:
        nursery.close()


class ForkServer:
    """The warm process, started from a module that calls `serve_forks`."""

    def __init__(
        self,
        module: str,
        arguments: Mapping[str, Any],
        *,
        errors: Path,
        pass_fds: Sequence[int] = (),
    ) -> None:
        """`arguments` reach the module as JSON, `errors` what it and its children print."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONPATH": str(ROOT),
        }
        with errors.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, json.dumps(arguments)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
                pass_fds=pass_fds,
            )
        self.ready = self._answer()

    def start(self, kind: str, **request: Any) -> int:
        """Fork a child; returns its process id."""
        pid = self._ask({"start": kind, **request})["pid"]
        assert isinstance(pid, int)
        return pid

    def kill(self, pid: int) -> dict[str, int]:
        """SIGKILL a child and say how it ended: it may have ended before."""
        return self._ask({"kill": pid})

    def look(self, pid: int) -> dict[str, int]:
        """How a child ended, or that it stopped since it was last asked; else empty."""
        return self._ask({"look": pid})

    def close(self) -> None:
        """Kill every child and end."""
        self._process.communicate(timeout=PATIENCE_S)

    def _ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the process that forks has ended; its errors say why")
        answer: dict[str, Any] = json.loads(line)
        return answer
