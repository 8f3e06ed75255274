"""The writer of the embedded log: its byte cap, a disk that refuses, and group commit."""

import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from draftkeep.errors import LogFullError, StoreError
from draftkeep.ingest.group_writer import GroupWriter
from draftkeep.ingest.sqlite_log import SqliteLog
from tests.clock import Clock
from tests.ingest.conftest import run_child

EVERYTHING = (10**6, 10**9)
MIB = 2**20


class TestCap:
    def test_a_full_log_refuses_before_writing_and_goes_on_when_freed(
        self, directory: Path, open_log: Callable[..., SqliteLog]
    ) -> None:
        draw = random.Random(5)
        log = open_log(cap_bytes=4 * MIB)
        written: list[bytes] = []
        for _ in range(3):
            with pytest.raises(LogFullError, match=r"log\.cap_bytes"):
                self._fill(log, draw, written)
            first, following = log.bounds()
            assert following == len(written)
            kept = [record.data for record in log.read(first, *EVERYTHING)]
            assert kept == written[first:]
            assert sum(map(len, kept)) > MIB
            log.free(following)
        log.close()

    @staticmethod
    def _fill(log: SqliteLog, draw: random.Random, written: list[bytes]) -> None:
        for _ in range(10_000):
            batch = [draw.randbytes(draw.choice([10, 9_000, 20_000, 200_000]))]
            log.append(batch)
            written += batch
            assert log.size_bytes() <= 4 * MIB

    def test_the_cap_holds_over_many_files(
        self, directory: Path, clock: Clock, open_log: Callable[..., SqliteLog]
    ) -> None:
        log = open_log(cap_bytes=2 * MIB)
        refused = 0
        for _ in range(60):
            clock.now_s += 10.0
            try:
                log.append([b"x" * 30_000])
            except LogFullError:
                refused += 1
            assert log.size_bytes() <= 2 * MIB
        assert 10 < refused < 50
        log.free(log.bounds()[1])
        log.append([b"x" * 30_000])
        log.close()

    def test_a_small_append_still_fits_where_a_large_one_was_refused(
        self, open_log: Callable[..., SqliteLog]
    ) -> None:
        log = open_log(cap_bytes=MIB)
        with pytest.raises(LogFullError):
            log.append([b"x" * MIB])
        assert log.append([b"a"]) == 0
        log.close()

    def test_a_disk_that_refuses_is_an_error_and_recovers(self, directory: Path) -> None:
        child = run_child(
            """
            import resource, sys, time
            from pathlib import Path
            from draftkeep.errors import LogFullError, StoreError
            from draftkeep.ingest.sqlite_log import SqliteLog

            log = SqliteLog(Path(sys.argv[1]), cap_bytes=2**30, bucket_s=10, clock=time.time)
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
            acknowledged = []
            for attempt in range(100):
                try:
                    acknowledged.append(log.append([b"%d" % attempt * 5000]))
                except StoreError as error:
                    assert not isinstance(error, LogFullError), error
                    break
            assert 0 < len(acknowledged) < 100, acknowledged
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            log.append([b"last"])
            offsets = [record.offset for record in log.read(0, 10**6, 10**9)]
            assert offsets == list(range(len(offsets))), offsets
            assert set(acknowledged) < set(offsets)
            assert log.read(0, 10**6, 10**9)[-1].data == b"last"
            log.close()
            """,
            directory,
        )
        child.communicate(timeout=120)
        assert child.returncode == 0


class TestGroupCommit:
    def test_appends_that_wait_share_one_commit(self, directory: Path) -> None:
        reached, may_go = threading.Event(), threading.Event()
        commits = iter(range(1000))

        def clock() -> float:
            # Holds the writer in its first commit until the others have queued up.
            if threading.current_thread().name == "log-writer":
                reached.set()
                assert may_go.wait(60)
            return 1000.0 + next(commits) * 1e-3

        writer = GroupWriter(
            directory, cap_bytes=2**30, bucket_s=10, clock=clock, random=random.randbytes
        )
        with ThreadPoolExecutor(20) as pool:
            first = pool.submit(writer.append, [b"first"])
            assert reached.wait(60)
            others = [pool.submit(writer.append, [b"other"]) for _ in range(19)]
            while writer.waiting < 19:
                threading.Event().wait(0.001)
            may_go.set()
            assert first.result() == 0
            assert {other.result() for other in others} == set(range(1, 20))
        writer.close()
        records = SqliteLog.open_reader(directory).read(0, *EVERYTHING)
        assert len({record.appended_s for record in records}) == 2


class TestClose:
    def test_a_writer_that_hangs_is_given_up_and_its_appends_fail(self, directory: Path) -> None:
        reached, may_go = threading.Event(), threading.Event()

        def clock() -> float:
            if threading.current_thread().name == "log-writer":
                reached.set()
                assert may_go.wait(60)
            return 1000.0

        log = SqliteLog(directory, cap_bytes=2**30, bucket_s=10, clock=clock)
        with ThreadPoolExecutor(2) as pool:
            under_way = pool.submit(log.append, [b"under way"])
            assert reached.wait(60)
            queued = pool.submit(log.append, [b"queued"])
            while log._writer.waiting < 1:
                threading.Event().wait(0.001)
            log.close(timeout_s=0.0)
            for append in (under_way, queued):
                with pytest.raises(StoreError, match="did not answer"):
                    append.result(60)
        with pytest.raises(StoreError, match="closed"):
            log.append([b"late"])
        with pytest.raises(StoreError, match="another process"):
            SqliteLog(directory, cap_bytes=2**30, bucket_s=10, clock=clock)
        may_go.set()
        log.close()
        reopened = SqliteLog(directory, cap_bytes=2**30, bucket_s=10, clock=lambda: 1000.0)
        assert [record.data for record in reopened.read(0, *EVERYTHING)] == [b"under way"]
        reopened.close()
