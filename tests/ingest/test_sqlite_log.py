"""What is particular to the embedded log: files, the cap, group commit, crashes, processes."""

import contextlib
import random
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from draftkeep.errors import LogFullError, StoreError
from draftkeep.ingest import buckets
from draftkeep.ingest.group_writer import GroupWriter
from draftkeep.ingest.sqlite_log import SqliteLog

EVERYTHING = (10**6, 10**9)
MIB = 2**20


class Clock:
    """Unix time as the test sets it."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


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


def starts(directory: Path) -> list[int]:
    return [bucket.start_s for bucket in buckets.list_buckets(directory)]


def everything_on_disk(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(directory.iterdir()))


def run_child(code: str, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


class TestFiles:
    def test_a_bucket_of_time_is_a_file_and_expiry_is_an_unlink(
        self, directory: Path, clock: Clock, open_log: Callable[..., SqliteLog]
    ) -> None:
        log = open_log()
        for clock.now_s in (1001.0, 1009.9, 1010.0, 1035.0):
            log.append([b"a"])
        assert starts(directory) == [1000, 1010, 1030]
        log.free(2)
        assert starts(directory) == [1010, 1030]
        log.free(4)
        assert starts(directory) == [1030]
        log.close()
        assert len(list(directory.iterdir())) == 2  # the newest file and the lock

    def test_a_clock_set_back_never_leads_to_an_older_file(
        self, directory: Path, clock: Clock, open_log: Callable[..., SqliteLog]
    ) -> None:
        log = open_log()
        for clock.now_s in (2000.0, 1500.0, 3.0):
            log.append([b"a"])
        log.close()
        log = open_log()
        log.append([b"b"])
        assert starts(directory) == [1000, 2000]
        assert [record.offset for record in log.read(0, *EVERYTHING)] == [0, 1, 2, 3]
        log.close()

    def test_freed_bytes_are_nowhere_on_disk(
        self, directory: Path, open_log: Callable[..., SqliteLog]
    ) -> None:
        log = open_log()
        log.append([b"MARK-OF-THE-FREED" * 400] * 50 + [b"MARK-OF-THE-KEPT"])
        assert b"MARK-OF-THE-FREED" in everything_on_disk(directory)
        SqliteLog.open_reader(directory).free(50)
        left = everything_on_disk(directory)
        assert b"MARK-OF-THE-FREED" not in left
        assert b"MARK-OF-THE-KEPT" in left
        log.close()

    def test_leftovers_of_a_crash_are_swept(
        self, directory: Path, open_log: Callable[..., SqliteLog]
    ) -> None:
        log = open_log()
        log.append([b"a"])
        log.close()
        stray = directory / "000000000990-0000000000000000000.db-wal"
        stray.write_bytes(b"side file of a database that was unlinked before the crash")
        (directory / "new.tmp").write_bytes(b"a bucket file that was never finished")
        log = open_log()
        assert not stray.exists()
        log.append([b"b"])
        assert [record.data for record in log.read(0, *EVERYTHING)] == [b"a", b"b"]
        log.close()

    def test_a_damaged_file_is_an_error_that_says_what_to_do(
        self, directory: Path, open_log: Callable[..., SqliteLog]
    ) -> None:
        log = open_log()
        log.append([b"a"])
        log.close()
        newest = buckets.list_buckets(directory)[-1].path
        good = newest.read_bytes()
        newest.write_bytes(b"\x00" * len(good))
        with pytest.raises(StoreError, match="directory aside"):
            open_log()
        with pytest.raises(StoreError, match="directory aside"):
            SqliteLog.open_reader(directory)
        newest.write_bytes(good)
        log = open_log()
        assert log.bounds() == (0, 1)
        log.close()

    def test_a_newer_format_is_refused(
        self, directory: Path, open_log: Callable[..., SqliteLog]
    ) -> None:
        open_log().close()
        newest = buckets.list_buckets(directory)[-1]
        with buckets.opened(newest) as connection:
            connection.execute("PRAGMA user_version = 2")
        with pytest.raises(StoreError, match="format 2, expected 1"):
            open_log()
        with pytest.raises(StoreError, match="format 2, expected 1"):
            SqliteLog.open_reader(directory)


class TestProcesses:
    def test_a_second_writer_is_refused_until_the_first_closes(
        self, open_log: Callable[..., SqliteLog]
    ) -> None:
        log = open_log()
        with pytest.raises(StoreError, match="another process writes"):
            open_log()
        assert log.append([b"a"]) == 0
        log.close()
        log = open_log()
        assert log.append([b"b"]) == 1
        log.close()

    def test_a_reader_cannot_append_and_needs_a_log(
        self, directory: Path, open_log: Callable[..., SqliteLog]
    ) -> None:
        with pytest.raises(StoreError, match="start the serving node"):
            SqliteLog.open_reader(directory)
        open_log().close()
        reader = SqliteLog.open_reader(directory)
        with pytest.raises(StoreError, match="opened for reading"):
            reader.append([b"a"])

    def test_a_file_held_open_elsewhere_can_be_freed(
        self, directory: Path, clock: Clock, open_log: Callable[..., SqliteLog]
    ) -> None:
        log = open_log()
        log.append([b"a", b"b"])
        oldest = buckets.list_buckets(directory)[0]
        clock.now_s = 1010.0
        log.append([b"c"])
        with buckets.opened(oldest) as held:
            SqliteLog.open_reader(directory).free(2)
            assert held.execute("SELECT count(*) FROM records").fetchone() == (2,)
        assert log.bounds() == (2, 3)
        assert not list(directory.glob(oldest.path.name + "*"))
        log.close()

    def test_another_process_reads_each_record_once_while_files_come_and_go(
        self, directory: Path, clock: Clock, open_log: Callable[..., SqliteLog]
    ) -> None:
        log = open_log()
        reader = run_child(
            """
            import sys
            from pathlib import Path
            from draftkeep.ingest.sqlite_log import SqliteLog

            log, position = SqliteLog.open_reader(Path(sys.argv[1])), 0
            while position < int(sys.argv[2]):
                for record in log.read(position, 7, 10**9):
                    assert record.offset == position == int(record.data), (position, record)
                    position += 1
                log.free(position)
                assert log.bounds()[0] >= position
            """,
            directory,
            300,
        )
        for i in range(150):
            clock.now_s += 3.0
            log.append([str(2 * i).encode(), str(2 * i + 1).encode()])
        reader.communicate(timeout=120)
        assert reader.returncode == 0
        assert log.bounds() == (300, 300)
        log.close()


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
            for line in child.communicate(timeout=60)[0].splitlines(keepends=True):
                self._note(witness, line)
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
