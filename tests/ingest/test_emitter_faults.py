"""Capture never harms serving: whatever breaks behind it, offers return and are counted."""

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from draftkeep.breaker import Breaker
from draftkeep.errors import KeyDestroyedError, LogFullError, StoreError
from draftkeep.ingest.codec import decode_body
from draftkeep.ingest.emitter import Emitter
from draftkeep.ingest.envelope import Sealer
from draftkeep.ingest.record import SealedTrace
from draftkeep.ingest.tables import only_identity
from draftkeep.ingest.trace import Provenance, Trace

if TYPE_CHECKING:
    from tests.ingest.conftest import Bench

LONG_S = 60.0


class TestFaults:
    """Whatever breaks, `offer` returns while the fault lasts and the drops are counted."""

    def test_a_slow_log_fills_the_queue_and_nothing_waits_for_it(self, bench: "Bench") -> None:
        log = bench.held_log()
        emitter = bench.emitter(log, queue_traces=10)
        emitter.offer(bench.trace(0), bench.provenance())
        assert log.reached.wait(LONG_S)
        # The log is held for the whole loop: an offer that waited for it would never come back.
        taken = [emitter.offer(bench.trace(mark), bench.provenance()) for mark in range(1, 51)]
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
    def test_a_failing_log(self, bench: "Bench", error: Exception, reason: str) -> None:
        log = bench.held_log(error, released=True)
        emitter = bench.emitter(log)
        assert all(emitter.offer(bench.trace(mark), bench.provenance()) for mark in range(20))
        assert emitter.flush(LONG_S)
        assert bench.witness.drops == [reason] * 20
        assert emitter.counts()[reason] == 20
        log.error = None
        assert emitter.offer(bench.trace(20), bench.provenance())
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
    def test_a_failing_sealer(self, bench: "Bench", error: Exception, reason: str) -> None:
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
            bench.keyring.node_keys(), "node-1", bench.signing, clock=lambda: bench.now_s
        )
        emitter = bench.emitter(bench.log(), sealer=sealer)
        assert all(emitter.offer(bench.trace(mark), bench.provenance()) for mark in range(10))
        assert emitter.flush(LONG_S)
        assert bench.witness.drops == [reason] * 9
        assert [trace.seed for trace in bench.open_all().values()] == [5]

    def test_a_failing_encoder_costs_only_its_trace(self, bench: "Bench") -> None:
        def encode(trace: Trace) -> bytes:
            if trace.seed == 3:
                raise RuntimeError("bug")
            return bench.encode(trace)

        emitter = bench.emitter(bench.log(), encode=encode)
        for mark in range(10):
            assert emitter.offer(bench.trace(mark), bench.provenance())
        assert emitter.flush(LONG_S)
        assert bench.witness.drops == ["seal_failed"]
        assert emitter.acknowledged == 9

    def test_callbacks_that_raise_are_ignored(self, bench: "Bench") -> None:
        def fail(_: object) -> None:
            raise RuntimeError("bug")

        log = bench.held_log()
        emitter = Emitter(
            bench.sealer, log, encode=bench.encode, queue_traces=2, on_drop=fail, on_ack=fail
        )
        emitter.offer(bench.trace(0), bench.provenance())
        assert log.reached.wait(LONG_S)
        taken = [emitter.offer(bench.trace(mark), bench.provenance()) for mark in range(5)]
        assert taken == [True, True, False, False, False]
        log.release.set()
        assert emitter.flush(LONG_S)
        assert emitter.acknowledged == 3
        emitter.close(LONG_S)

    def test_a_full_disk_drops_and_recovers(self, tmp_path: Path) -> None:
        """A real refusal by the operating system, in a process with a limit on file size."""
        script = """
            import resource, sys
            from pathlib import Path
            sys.path.insert(0, sys.argv[1])
            from tests.ingest.conftest import LONG_S, Bench

            bench = Bench(Path(sys.argv[2]))
            emitter = bench.emitter(bench.log())
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            assert emitter.offer(bench.trace(0), bench.provenance())
            assert emitter.flush(LONG_S)
            resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, hard))
            big = [bench.trace(mark, positions=300, k=32) for mark in range(1, 60)]
            assert all(emitter.offer(trace, bench.provenance()) for trace in big)
            assert emitter.flush(LONG_S)
            failed = emitter.counts()["log_failed"]
            assert failed > 0, emitter.counts()
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            assert emitter.offer(bench.trace(60), bench.provenance())
            assert emitter.flush(LONG_S)
            assert emitter.acknowledged == 61 - failed
            assert len(bench.witness.drops) == failed
            assert set(bench.witness.acknowledged) <= set(bench.open_all())
            bench.close()
            """
        code = textwrap.dedent(script)
        command = [sys.executable, "-c", code, str(Path(__file__).parents[2]), str(tmp_path)]
        child = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert child.returncode == 0, child.stderr

    def test_after_close_everything_is_refused(self, bench: "Bench") -> None:
        emitter = bench.emitter(bench.held_log(released=True))
        emitter.close(LONG_S)
        assert not emitter.offer(bench.trace(0), bench.provenance())
        assert bench.witness.drops == ["closed"]

    def test_close_gives_up_on_a_log_that_hangs(self, bench: "Bench") -> None:
        log = bench.held_log()
        emitter = bench.emitter(log)
        emitter.offer(bench.trace(0), bench.provenance())
        assert log.reached.wait(LONG_S)
        for mark in range(1, 8):
            emitter.offer(bench.trace(mark), bench.provenance())
        emitter.close(0.01)
        assert bench.witness.drops == ["closed"] * 7
        log.release.set()
        assert emitter.flush(LONG_S)
        assert emitter.acknowledged == 1


class TestBreaker:
    def test_it_opens_after_repeated_failures_and_closes_after_a_success(
        self, bench: "Bench"
    ) -> None:
        now_s = [0.0]
        log = bench.held_log(StoreError("disk"), released=True)
        emitter = Emitter(
            bench.sealer,
            log,
            encode=bench.encode,
            queue_traces=100,
            on_drop=bench.witness.drops.append,
            breaker=Breaker(threshold=3, pause_s=0.001, max_pause_s=0.001),
            clock=lambda: now_s[0],
        )
        for mark in range(3):
            assert emitter.offer(bench.trace(mark), bench.provenance())
            assert emitter.flush(LONG_S)
        assert bench.witness.drops == ["log_failed"] * 3
        assert not emitter.offer(bench.trace(3), bench.provenance())
        assert bench.witness.drops[3:] == ["breaker_open"]
        assert log.appends == 3
        now_s[0] = 1.0
        assert emitter.offer(bench.trace(4), bench.provenance())
        assert emitter.flush(LONG_S)
        assert bench.witness.drops[4:] == ["log_failed"]
        assert not emitter.offer(bench.trace(5), bench.provenance())
        now_s[0], log.error = 2.0, None
        for mark in range(6, 9):
            assert emitter.offer(bench.trace(mark), bench.provenance())
        assert emitter.flush(LONG_S)
        assert emitter.acknowledged == len(log.records) == 3
        emitter.close(LONG_S)

    def test_what_waits_when_it_opens_is_tried_after_the_pause(self, bench: "Bench") -> None:
        log = bench.held_log(StoreError("disk"))
        emitter = bench.emitter(log, breaker=Breaker(threshold=1, pause_s=0.001))
        emitter.offer(bench.trace(0), bench.provenance())
        assert log.reached.wait(LONG_S)
        for mark in range(1, 30):
            assert emitter.offer(bench.trace(mark), bench.provenance())
        log.reached.clear()
        log.release.set()
        assert log.reached.wait(LONG_S)
        log.error = None
        assert emitter.flush(LONG_S)
        assert emitter.acknowledged + bench.witness.count("log_failed") == 30
        assert emitter.acknowledged >= 20

    def test_missing_keys_of_one_tenant_do_not_open_it_for_others(self, bench: "Bench") -> None:
        class OneTenantSealer(Sealer):
            def held_out(self, provenance: Provenance) -> bool:
                if provenance.subject == "unknown":
                    raise KeyDestroyedError("gone")
                return super().held_out(provenance)

        sealer = OneTenantSealer(
            bench.keyring.node_keys(), "node-1", bench.signing, clock=lambda: bench.now_s
        )
        emitter = bench.emitter(
            bench.log(), sealer=sealer, breaker=Breaker(threshold=1, pause_s=1000.0)
        )
        for mark in range(40):
            subject = "unknown" if mark % 2 else "person"
            assert emitter.offer(bench.trace(mark), bench.provenance(subject))
        assert emitter.flush(LONG_S)
        assert emitter.acknowledged == bench.witness.count("no_key") == 20
