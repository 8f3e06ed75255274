"""The emitter: what it delivers opens, and nothing that breaks behind it reaches the caller."""

import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from draftkeep.config import RetentionConfig
from draftkeep.errors import KeyDestroyedError, LogFullError, StoreError
from draftkeep.ingest.breaker import Breaker
from draftkeep.ingest.codec import decode_body, encode_body
from draftkeep.ingest.emitter import MAX_BODY_BYTES, Emitter
from draftkeep.ingest.envelope import Opener, Sealer
from draftkeep.ingest.log import Log, LogRecord
from draftkeep.ingest.record import MAX_RECORD_BYTES, SealedTrace, decode_record
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.ingest.tables import RemapTable, only_identity
from draftkeep.ingest.trace import Branch, Finish, How, Provenance, TopK, Trace
from draftkeep.kernels.sampling import Sampling
from draftkeep.policies.keyring import Keyring
from draftkeep.policies.signing import SigningKey

NOW_S = 1_000_000
LONG_S = 60.0
EVERYTHING = (10**6, 10**9)


def make_topk(rows: int, k: int, seed: int) -> TopK:
    draw = np.random.default_rng(seed)
    return TopK(
        ids_TK=draw.integers(0, 50_000, (rows, k)).astype(np.int32),
        logprobs_TK=-np.sort(draw.exponential(3.0, (rows, k)).astype(np.float32), axis=1),
        k_T=np.full(rows, k, np.uint8),
        tail_T=np.full(rows, -3.0, np.float32),
        tail_known_T=np.ones(rows, np.bool_),
    )


def make_trace(mark: int, *, positions: int = 3, k: int = 4) -> Trace:
    return Trace(
        prompt_ids_P=np.array([mark], np.int32),
        output_ids_T=np.arange(positions, dtype=np.int32),
        topk=make_topk(positions, k, mark),
        how_T=np.full(positions, How.PLAIN, np.uint8),
        rejected_T=np.full(positions, -1, np.int32),
        sampling=Sampling(),
        seed=mark,
        choice=0,
        finish=Finish.STOP,
    )


def provenance(subject: str | None = "person") -> Provenance:
    return Provenance(
        tenant="acme",
        subject=subject,
        response_id=os.urandom(16),
        domain="sql",
        consent=0,
        policy_version=1,
        created_s=NOW_S,
        target=b"t" * 32,
        tokenizer=b"k" * 32,
    )


class Witness:
    """What an emitter told the outside."""

    def __init__(self) -> None:
        self.drops: list[str] = []
        self.acknowledged: list[bytes] = []

    def count(self, reason: str) -> int:
        return self.drops.count(reason)


class Bench:
    """The real parts around an emitter, in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.keyring = Keyring.open(
            directory / "keys", retention=RetentionConfig(), clock=lambda: float(NOW_S)
        )
        self.signing = SigningKey(b"s" * 32)
        self.sealer = Sealer(
            self.keyring.node_keys(), "node-1", self.signing, clock=lambda: float(NOW_S)
        )
        self.witness = Witness()
        self._closing: list[Callable[[], None]] = [self.keyring.close]

    def log(self) -> SqliteLog:
        log = SqliteLog(
            self.directory / "log", cap_bytes=2**30, bucket_s=600, clock=lambda: float(NOW_S)
        )
        self._closing.append(log.close)
        return log

    def emitter(
        self,
        log: Log,
        *,
        sealer: Sealer | None = None,
        encode: Callable[[Trace], bytes] | None = None,
        queue_traces: int = 1000,
        breaker: Breaker | None = None,
    ) -> Emitter:
        emitter = Emitter(
            sealer if sealer is not None else self.sealer,
            log,
            encode=encode if encode is not None else encode_plain,
            queue_traces=queue_traces,
            on_drop=self.witness.drops.append,
            on_ack=self.witness.acknowledged.append,
            breaker=breaker if breaker is not None else Breaker(threshold=10**6),
        )
        self._closing.append(lambda: emitter.close(0))
        return emitter

    def open_all(self) -> dict[bytes, Trace]:
        """Every trace in the log by trace id, opened with the job's keys."""
        opener = Opener(
            self.keyring.job_keys(), lambda _: self.signing.public, clock=lambda: float(NOW_S)
        )
        records = SqliteLog.open_reader(self.directory / "log").read(0, *EVERYTHING)
        sealed = [decode_record(record.data) for record in records]
        return {
            item.parsed.trace_id: decode_body(opener.open(item), only_identity) for item in sealed
        }

    def close(self) -> None:
        for close in reversed(self._closing):
            close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def encode_plain(trace: Trace) -> bytes:
    return encode_body(trace, RemapTable.identity())


class HeldLog:
    """A log that keeps every append waiting until it is released, then does as it is told."""

    def __init__(self, error: Exception | None = None, *, released: bool = False) -> None:
        self.error = error
        self.reached = threading.Event()
        self.release = threading.Event()
        self.records: list[bytes] = []
        self.appends = 0
        if released:
            self.release.set()

    def append(self, records: Sequence[bytes]) -> int:
        self.appends += 1
        self.reached.set()
        assert self.release.wait(LONG_S)
        if self.error is not None:
            raise self.error
        self.records += records
        return len(self.records) - len(records)

    def read(self, start: int, limit_records: int, limit_bytes: int) -> list[LogRecord]:
        raise NotImplementedError

    def free(self, up_to: int) -> None:
        raise NotImplementedError

    def bounds(self) -> tuple[int, int]:
        return (0, len(self.records))

    def size_bytes(self) -> int:
        return sum(map(len, self.records))

    def identity(self) -> tuple[str, str, int]:
        return ("cluster", "topic", 0)

    def close(self) -> None:
        self.release.set()


class TestDelivery:
    def test_what_is_acknowledged_lies_in_the_log_and_opens(self, bench: Bench) -> None:
        emitter = bench.emitter(bench.log())
        traces = [make_trace(mark) for mark in range(150)]
        assert all(emitter.offer(trace, provenance()) for trace in traces)
        assert emitter.flush(LONG_S)
        opened = bench.open_all()
        assert list(opened) == bench.witness.acknowledged
        assert [trace.seed for trace in opened.values()] == list(range(150))
        assert emitter.acknowledged == 150
        assert emitter.cut == 0
        assert set(emitter.counts().values()) == {0}

    def test_held_out_is_decided_by_the_subject(self, bench: Bench) -> None:
        emitter = bench.emitter(bench.log())
        for mark in range(200):
            emitter.offer(make_trace(mark), provenance(f"person-{mark % 100}"))
        emitter.flush(LONG_S)
        bits = {trace.seed: trace.held_out for trace in bench.open_all().values()}
        assert [bits[mark] for mark in range(100)] == [bits[mark] for mark in range(100, 200)]
        assert 0 < sum(bits.values()) < 100
        assert bits[3] == bench.sealer.held_out(provenance("person-3"))

    def test_close_delivers_what_waits(self, bench: Bench) -> None:
        log = HeldLog()
        emitter = bench.emitter(log)
        for mark in range(100):
            emitter.offer(make_trace(mark), provenance())
        assert log.reached.wait(LONG_S)
        log.release.set()
        emitter.close(LONG_S)
        assert len(log.records) == emitter.acknowledged == 100

    def test_a_large_trace_is_cut_to_one_record(self, bench: Bench) -> None:
        emitter = bench.emitter(bench.log())
        trace = make_trace(1, positions=4000, k=250)
        assert len(encode_plain(trace)) > MAX_RECORD_BYTES
        emitter.offer(trace, provenance())
        emitter.flush(LONG_S)
        (opened,) = bench.open_all().values()
        assert opened.output_cut
        assert 100 < opened.positions < 4000
        assert emitter.cut == emitter.acknowledged == 1

    def test_branches_go_before_positions(self, bench: Bench) -> None:
        emitter = bench.emitter(bench.log())
        plain = make_trace(1, positions=100)
        branch = Branch(
            start=5, draft_ids_N=np.arange(4000, dtype=np.int32), topk=make_topk(4000, 250, 2)
        )
        fields = {name: getattr(plain, name) for name in Trace.__slots__}
        emitter.offer(Trace(**{**fields, "branches": (branch,)}), provenance())
        emitter.flush(LONG_S)
        (opened,) = bench.open_all().values()
        assert not opened.output_cut
        assert opened.positions == 100
        assert opened.branches == ()
        assert emitter.cut == 1

    def test_a_trace_that_cannot_be_cut_enough_is_dropped(self, bench: Bench) -> None:
        emitter = bench.emitter(bench.log(), encode=lambda _: bytes(MAX_BODY_BYTES + 1))
        emitter.offer(make_trace(1), provenance())
        emitter.flush(LONG_S)
        assert bench.witness.drops == ["too_large"]


class TestFaults:
    """Whatever breaks, `offer` returns while the fault lasts and the drops are counted."""

    def test_a_slow_log_fills_the_queue_and_nothing_waits_for_it(self, bench: Bench) -> None:
        log = HeldLog()
        emitter = bench.emitter(log, queue_traces=10)
        emitter.offer(make_trace(0), provenance())
        assert log.reached.wait(LONG_S)
        # The log is held for the whole loop: an offer that waited for it would never come back.
        taken = [emitter.offer(make_trace(mark), provenance()) for mark in range(1, 51)]
        assert taken == [True] * 10 + [False] * 40
        assert not log.release.is_set()
        assert emitter.counts()["queue_full"] == bench.witness.count("queue_full") == 40
        log.release.set()
        assert emitter.flush(LONG_S)
        assert emitter.acknowledged == len(log.records) == 11

    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            (LogFullError("full"), "log_full"),
            (StoreError("disk"), "log_failed"),
            (OSError(28, "No space left on device"), "log_failed"),
            (MemoryError(), "log_failed"),
        ],
    )
    def test_a_failing_log(self, bench: Bench, error: Exception, reason: str) -> None:
        log = HeldLog(error, released=True)
        emitter = bench.emitter(log)
        assert all(emitter.offer(make_trace(mark), provenance()) for mark in range(20))
        assert emitter.flush(LONG_S)
        assert bench.witness.drops == [reason] * 20
        assert emitter.counts()[reason] == 20
        log.error = None
        assert emitter.offer(make_trace(20), provenance())
        assert emitter.flush(LONG_S)
        assert emitter.acknowledged == len(bench.witness.acknowledged) == 1

    @pytest.mark.parametrize(
        ("error", "reason"),
        [
            (KeyDestroyedError("gone"), "no_key"),
            (RuntimeError("bug"), "seal_failed"),
            (ValueError("bug"), "seal_failed"),
        ],
    )
    def test_a_failing_sealer(self, bench: Bench, error: Exception, reason: str) -> None:
        class FailingSealer(Sealer):
            def seal(
                self, body: bytes, provenance: Provenance, *, prompt_tokens: int, positions: int
            ) -> SealedTrace:
                if decode_body(body, only_identity).seed == 5:
                    return super().seal(
                        body, provenance, prompt_tokens=prompt_tokens, positions=positions
                    )
                raise error

        sealer = FailingSealer(
            bench.keyring.node_keys(), "node-1", bench.signing, clock=lambda: float(NOW_S)
        )
        emitter = bench.emitter(bench.log(), sealer=sealer)
        assert all(emitter.offer(make_trace(mark), provenance()) for mark in range(10))
        assert emitter.flush(LONG_S)
        assert bench.witness.drops == [reason] * 9
        assert [trace.seed for trace in bench.open_all().values()] == [5]

    def test_a_failing_encoder_costs_only_its_trace(self, bench: Bench) -> None:
        def encode(trace: Trace) -> bytes:
            if trace.seed == 3:
                raise RuntimeError("bug")
            return encode_plain(trace)

        emitter = bench.emitter(bench.log(), encode=encode)
        for mark in range(10):
            assert emitter.offer(make_trace(mark), provenance())
        assert emitter.flush(LONG_S)
        assert bench.witness.drops == ["seal_failed"]
        assert emitter.acknowledged == 9

    def test_callbacks_that_raise_are_ignored(self, bench: Bench) -> None:
        def fail(_: object) -> None:
            raise RuntimeError("bug")

        log = HeldLog()
        emitter = Emitter(
            bench.sealer, log, encode=encode_plain, queue_traces=2, on_drop=fail, on_ack=fail
        )
        emitter.offer(make_trace(0), provenance())
        assert log.reached.wait(LONG_S)
        taken = [emitter.offer(make_trace(mark), provenance()) for mark in range(5)]
        assert taken == [True, True, False, False, False]
        log.release.set()
        assert emitter.flush(LONG_S)
        assert emitter.acknowledged == 3
        emitter.close(LONG_S)

    def test_a_full_disk_drops_and_recovers(self, tmp_path: Path) -> None:
        """A real refusal by the operating system, in a process with a limit on file size."""
        script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        script += "import test_emitter; test_emitter.full_disk_child(sys.argv[1])"
        child = subprocess.run(
            [sys.executable, "-c", script, str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert child.returncode == 0, child.stderr

    def test_after_close_everything_is_refused(self, bench: Bench) -> None:
        emitter = bench.emitter(HeldLog(released=True))
        emitter.close(LONG_S)
        assert not emitter.offer(make_trace(0), provenance())
        assert bench.witness.drops == ["closed"]

    def test_close_gives_up_on_a_log_that_hangs(self, bench: Bench) -> None:
        log = HeldLog()
        emitter = bench.emitter(log)
        emitter.offer(make_trace(0), provenance())
        assert log.reached.wait(LONG_S)
        for mark in range(1, 8):
            emitter.offer(make_trace(mark), provenance())
        emitter.close(0.01)
        assert bench.witness.drops == ["closed"] * 7
        log.release.set()
        assert emitter.flush(LONG_S)
        assert emitter.acknowledged == 1


class TestBreaker:
    def test_it_opens_after_repeated_failures_and_closes_after_a_success(
        self, bench: Bench
    ) -> None:
        now_s = [0.0]
        log = HeldLog(StoreError("disk"), released=True)
        emitter = Emitter(
            bench.sealer,
            log,
            encode=encode_plain,
            queue_traces=100,
            on_drop=bench.witness.drops.append,
            breaker=Breaker(threshold=3, pause_s=0.001, max_pause_s=0.001),
            clock=lambda: now_s[0],
        )
        for mark in range(3):
            assert emitter.offer(make_trace(mark), provenance())
            assert emitter.flush(LONG_S)
        assert bench.witness.drops == ["log_failed"] * 3
        assert not emitter.offer(make_trace(3), provenance())
        assert bench.witness.drops[3:] == ["breaker_open"]
        assert log.appends == 3
        now_s[0] = 1.0
        assert emitter.offer(make_trace(4), provenance())
        assert emitter.flush(LONG_S)
        assert bench.witness.drops[4:] == ["log_failed"]
        assert not emitter.offer(make_trace(5), provenance())
        now_s[0], log.error = 2.0, None
        for mark in range(6, 9):
            assert emitter.offer(make_trace(mark), provenance())
        assert emitter.flush(LONG_S)
        assert emitter.acknowledged == len(log.records) == 3
        emitter.close(LONG_S)

    def test_what_waits_when_it_opens_is_tried_after_the_pause(self, bench: Bench) -> None:
        log = HeldLog(StoreError("disk"))
        emitter = bench.emitter(log, breaker=Breaker(threshold=1, pause_s=0.001))
        emitter.offer(make_trace(0), provenance())
        assert log.reached.wait(LONG_S)
        for mark in range(1, 30):
            assert emitter.offer(make_trace(mark), provenance())
        log.reached.clear()
        log.release.set()
        assert log.reached.wait(LONG_S)
        log.error = None
        assert emitter.flush(LONG_S)
        assert emitter.acknowledged + bench.witness.count("log_failed") == 30
        assert emitter.acknowledged >= 20

    def test_missing_keys_of_one_tenant_do_not_open_it_for_others(self, bench: Bench) -> None:
        class OneTenantSealer(Sealer):
            def held_out(self, provenance: Provenance) -> bool:
                if provenance.subject == "unknown":
                    raise KeyDestroyedError("gone")
                return super().held_out(provenance)

        sealer = OneTenantSealer(
            bench.keyring.node_keys(), "node-1", bench.signing, clock=lambda: float(NOW_S)
        )
        emitter = bench.emitter(
            bench.log(), sealer=sealer, breaker=Breaker(threshold=1, pause_s=1000.0)
        )
        for mark in range(40):
            subject = "unknown" if mark % 2 else "person"
            assert emitter.offer(make_trace(mark), provenance(subject))
        assert emitter.flush(LONG_S)
        assert emitter.acknowledged == bench.witness.count("no_key") == 20


class TestManyThreads:
    def test_every_offer_is_acknowledged_or_counted(self, bench: Bench) -> None:
        emitter = bench.emitter(bench.log(), queue_traces=16)
        taken: list[bool] = []

        def offer(worker: int) -> None:
            for mark in range(50):
                taken.append(emitter.offer(make_trace(100 * worker + mark), provenance()))

        threads = [threading.Thread(target=offer, args=(worker,)) for worker in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LONG_S)
        assert emitter.flush(LONG_S)
        assert len(taken) == 300
        assert emitter.acknowledged == sum(taken) == len(bench.open_all())
        assert emitter.counts()["queue_full"] == 300 - sum(taken)
        assert len(set(bench.witness.acknowledged)) == sum(taken)


def full_disk_child(directory: str) -> None:
    """Offer until the disk refuses, then give it room; runs in a process of its own."""
    bench = Bench(Path(directory))
    emitter = bench.emitter(bench.log(), breaker=Breaker(threshold=10**6))
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    assert emitter.offer(make_trace(0), provenance())
    assert emitter.flush(LONG_S)
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
    big = [make_trace(mark, positions=300, k=32) for mark in range(1, 60)]
    assert all(emitter.offer(trace, provenance()) for trace in big)
    assert emitter.flush(LONG_S)
    failed = emitter.counts()["log_failed"]
    assert failed > 0, emitter.counts()
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert emitter.offer(make_trace(60), provenance())
    assert emitter.flush(LONG_S)
    assert emitter.acknowledged == 61 - failed
    assert len(bench.witness.drops) == failed
    assert set(bench.witness.acknowledged) <= set(bench.open_all())
    bench.close()
