"""What is particular to the embedded log: its files, and other processes beside the writer."""

from collections.abc import Callable
from pathlib import Path

import pytest

from draftkeep.errors import StoreError
from draftkeep.ingest import group_writer, log_files
from draftkeep.ingest.sqlite_log import SqliteLog
from tests.clock import Clock
from tests.ingest.conftest import run_child

EVERYTHING = (10**6, 10**9)


def starts(directory: Path) -> list[int]:
    return [file.start_s for file in log_files.list_files(directory)]


def everything_on_disk(directory: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(directory.iterdir()))


class TestFiles:
    def test_a_stretch_of_time_is_a_file_and_expiry_is_an_unlink(
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

    def test_what_nobody_read_in_time_goes_and_nothing_behind_a_younger_record(
        self, directory: Path, clock: Clock, open_log: Callable[..., SqliteLog]
    ) -> None:
        log = open_log()
        assert log.expire(10**9) == 0
        for clock.now_s in (1001.0, 1009.0, 1012.0, 1018.0, 1011.0, 1035.0):
            log.append([b"a", b"b"])
        assert log.expire(1001.0) == 0
        assert log.expire(1009.0) == 2
        assert log.bounds() == (2, 12)
        assert log.expire(1013.0) == 4
        assert log.bounds() == (6, 12)
        assert starts(directory) == [1010, 1030]
        assert log.expire(1019.0) == 4
        assert log.bounds() == (10, 12)
        assert log.expire(10**9) == 2
        assert log.bounds() == (12, 12)
        assert starts(directory) == [1030]
        assert log.append([b"c"]) == 12
        log.close()

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

    def test_a_busy_stretch_has_several_files_that_are_freed_one_by_one(
        self,
        directory: Path,
        open_log: Callable[..., SqliteLog],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(group_writer, "_FILE_BYTES", 6 * 2**20)
        log = open_log()
        for _ in range(24):
            log.append([b"x" * 2**20])
        names = starts(directory)
        assert names == [1000] * len(names)
        assert 3 <= len(names) <= 5
        assert log.bounds() == (0, 24)
        assert [record.offset for record in log.read(0, *EVERYTHING)] == list(range(24))
        log.free(23)
        assert starts(directory) == [1000]
        assert [record.offset for record in log.read(0, *EVERYTHING)] == [23]
        log.close()
        log = open_log()
        assert log.append([b"more"]) == 24
        log.close()

    def test_a_commit_waits_for_the_disk(
        self, directory: Path, open_log: Callable[..., SqliteLog]
    ) -> None:
        open_log().close()
        with log_files.opened(log_files.list_files(directory)[0]) as connection:
            values = {
                name: connection.execute(f"PRAGMA {name}").fetchone()[0]
                for name in ("journal_mode", "synchronous", "page_size")
            }
        assert values == {"journal_mode": "wal", "synchronous": 2, "page_size": 16384}

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
        (directory / "new.tmp").write_bytes(b"a file that was never finished")
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
        newest = log_files.list_files(directory)[-1].path
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
        newest = log_files.list_files(directory)[-1]
        with log_files.opened(newest) as connection:
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
        oldest = log_files.list_files(directory)[0]
        clock.now_s = 1010.0
        log.append([b"c"])
        with log_files.opened(oldest) as held:
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
