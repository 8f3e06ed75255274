"""The emitter: what it delivers opens, and every offer is acknowledged or counted."""

import threading
from typing import TYPE_CHECKING

import numpy as np

from draftkeep.ingest.emitter import MAX_BODY_BYTES
from draftkeep.ingest.record import MAX_RECORD_BYTES
from draftkeep.ingest.trace import Branch, Trace

if TYPE_CHECKING:
    from tests.ingest.conftest import Bench

LONG_S = 60.0


class TestDelivery:
    def test_what_is_acknowledged_lies_in_the_log_and_opens(self, bench: "Bench") -> None:
        emitter = bench.emitter(bench.log())
        traces = [bench.trace(mark) for mark in range(150)]
        assert all(emitter.offer(trace, bench.provenance()) for trace in traces)
        assert emitter.flush(LONG_S)
        opened = bench.open_all()
        assert list(opened) == bench.witness.acknowledged
        assert [trace.seed for trace in opened.values()] == list(range(150))
        assert emitter.acknowledged == 150
        assert emitter.cut == 0
        assert set(emitter.counts().values()) == {0}

    def test_held_out_is_decided_by_the_subject(self, bench: "Bench") -> None:
        emitter = bench.emitter(bench.log())
        for mark in range(200):
            emitter.offer(bench.trace(mark), bench.provenance(f"person-{mark % 100}"))
        emitter.flush(LONG_S)
        bits = {trace.seed: trace.held_out for trace in bench.open_all().values()}
        assert [bits[mark] for mark in range(100)] == [bits[mark] for mark in range(100, 200)]
        assert 0 < sum(bits.values()) < 100
        assert bits[3] == bench.sealer.held_out(bench.provenance("person-3"))

    def test_close_delivers_what_waits(self, bench: "Bench") -> None:
        log = bench.held_log()
        emitter = bench.emitter(log)
        for mark in range(100):
            emitter.offer(bench.trace(mark), bench.provenance())
        assert log.reached.wait(LONG_S)
        log.release.set()
        emitter.close(LONG_S)
        assert len(log.records) == emitter.acknowledged == 100

    def test_a_large_trace_is_cut_to_one_record(self, bench: "Bench") -> None:
        emitter = bench.emitter(bench.log())
        trace = bench.trace(1, positions=4000, k=250)
        assert len(bench.encode(trace)) > MAX_RECORD_BYTES
        emitter.offer(trace, bench.provenance())
        emitter.flush(LONG_S)
        (opened,) = bench.open_all().values()
        assert opened.output_cut
        assert 100 < opened.positions < 4000
        assert emitter.cut == emitter.acknowledged == 1

    def test_branches_go_before_positions(self, bench: "Bench") -> None:
        emitter = bench.emitter(bench.log())
        plain = bench.trace(1, positions=100)
        branch = Branch(
            start=5, draft_ids_N=np.arange(4000, dtype=np.int32), topk=bench.topk(4000, 250, 2)
        )
        fields = {name: getattr(plain, name) for name in Trace.__slots__}
        emitter.offer(Trace(**{**fields, "branches": (branch,)}), bench.provenance())
        emitter.flush(LONG_S)
        (opened,) = bench.open_all().values()
        assert not opened.output_cut
        assert opened.positions == 100
        assert opened.branches == ()
        assert emitter.cut == 1

    def test_a_trace_that_cannot_be_cut_enough_is_dropped(self, bench: "Bench") -> None:
        emitter = bench.emitter(bench.log(), encode=lambda _: bytes(MAX_BODY_BYTES + 1))
        emitter.offer(bench.trace(1), bench.provenance())
        emitter.flush(LONG_S)
        assert bench.witness.drops == ["too_large"]


class TestManyThreads:
    def test_every_offer_is_acknowledged_or_counted(self, bench: "Bench") -> None:
        emitter = bench.emitter(bench.log(), queue_traces=16)
        taken: list[bool] = []

        def offer(worker: int) -> None:
            for mark in range(50):
                taken.append(emitter.offer(bench.trace(100 * worker + mark), bench.provenance()))

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
