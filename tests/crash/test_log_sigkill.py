"""SIGKILL of the embedded log's writer and of a process that frees: what stays on disk."""

import contextlib
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from draftkeep.ingest.sqlite_log import SqliteLog
from tests.clock import Clock

EVERYTHING = (10**6, 10**9)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "traces"


@pytest.fixture
def open_log(directory: Path, clock: Clock) -> Callable[..., SqliteLog]:
    def open_(cap_bytes: int = 2**30) -> SqliteLog:
        return SqliteLog(directory, cap_bytes=cap_bytes, bucket_s=10, clock=clock)

    return open_


def run_child(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


class TestSigkill:
    CHILD = """
        import os, sys, threading, time
        from pathlib import Path
        from draftkeep.ingest.sqlite_log import SqliteLog

        steps = iter(range(10**9))
        base = float(sys.argv[2])
        log = SqliteLog(
            Path(sys.argv[1]), cap_bytes=2**30, bucket_s=10, clock=lambda: base + next(steps)
        )

        def append(worker):
            for i in range(10**9):
                name = b"%d-%d-%d" % (os.getpid(), worker, i)
                offset = log.append([name + b" " + b"x" * (i % 7 * 4000)])
                os.write(1, b"%d %s\\n" % (offset, name))

        for worker in range(4):
            threading.Thread(target=append, args=(worker,), daemon=True).start()
        time.sleep(60)
        """

    def test_acknowledged_records_outlive_a_kill_at_any_moment(self, directory: Path) -> None:
        draw = random.Random(11)
        witness: dict[int, str] = {}
        ends = []
        for round_ in range(6):
            child = run_child(self.CHILD, directory, 1000 * round_)
            assert child.stdout is not None
            for _ in range(draw.randrange(1, 150)):
                self._note(witness, child.stdout.readline())
            child.send_signal(signal.SIGKILL)
            # By the reader that gave the lines before: it may hold the beginning of the next.
            for line in child.stdout.read().splitlines(keepends=True):
                self._note(witness, line)
            child.wait(60)
            child.stdout.close()
            stored = self._stored(directory)
            ends.append(max(stored) + 1)
            assert list(stored) == list(range(len(stored)))
            assert len(set(stored.values())) == len(stored)
            for offset, name in witness.items():
                assert stored[offset] == name
        assert ends == sorted(set(ends))
        assert len(witness) > 50

    @staticmethod
    def _note(witness: dict[int, str], line: str) -> None:
        if line.endswith("\n"):
            offset, name = line.split()
            assert int(offset) not in witness
            witness[int(offset)] = name

    @staticmethod
    def _stored(directory: Path) -> dict[int, str]:
        records = SqliteLog.open_reader(directory).read(0, *EVERYTHING)
        return {record.offset: record.data.split()[0].decode() for record in records}

    def test_a_kill_while_freeing_leaves_what_was_not_freed(
        self, directory: Path, clock: Clock, open_log: Callable[..., SqliteLog]
    ) -> None:
        draw = random.Random(3)
        log = open_log()
        for i in range(12):
            clock.now_s += 4.0
            log.append([b"%d " % (100 * i + j) + b"x" * 5000 for j in range(100)])
        for up_to in range(150, 1151, 250):
            child = run_child(
                """
                import sys
                from pathlib import Path
                from draftkeep.ingest.sqlite_log import SqliteLog

                log = SqliteLog.open_reader(Path(sys.argv[1]))
                print("ready", flush=True)
                log.free(int(sys.argv[2]))
                """,
                directory,
                up_to,
            )
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(draw.random() * 0.05)
            child.kill()
            child.communicate(timeout=60)
            first, following = log.bounds()
            assert first <= up_to
            assert following == log.append([]) == 1200
            offsets = [record.offset for record in log.read(0, *EVERYTHING)]
            assert offsets == list(range(first, 1200))
        log.free(1200)
        assert log.append([b"after"]) == 1200
        log.close()
