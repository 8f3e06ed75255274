"""What an outage of the brokers costs a node: traces lost and doubled, memory, the emit call.

    python -m bench.faults.outages [--seconds 600] [--kinds frozen killed partitioned slow]

A node's emitter, log and forwarder against one real broker, 200 traces of about 10 KB a second
throughout. The outage begins after ten seconds; then everything is given time to arrive, and the
topic is read to the end. Needs Java and about 4 GB of disk for ten minutes.
"""

import argparse
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from bench.results import RESULTS_DIR, Row, append_rows
from draftkeep.breaker import Breaker
from draftkeep.config import RetentionConfig
from draftkeep.ingest.codec import encode_body
from draftkeep.ingest.emitter import Emitter
from draftkeep.ingest.envelope import Sealer
from draftkeep.ingest.kafka_topic import create_topic
from draftkeep.ingest.log import Log
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.ingest.tables import RemapTable
from draftkeep.policies.keyring import Keyring
from draftkeep.policies.names import ID_BYTES
from draftkeep.policies.signing import SigningKey
from tests.ingest.steady import Steady, arrived, resident_bytes, wait_for
from tests.ingest.traces import make_provenance, make_trace
from tests.services.kafka import JVM, Kafka, running_kafka

KINDS = ("frozen", "killed", "partitioned", "slow")
RATE_PER_S = 200.0
CALM_S = 10.0
DEADLINE_S = 10.0
CAP_BYTES = 8 * 1024**3
POSITIONS, K = 130, 32
SLOW_BYTES_PER_S, SLOW_DELAY_S = 500_000, 0.05
TOPIC = "outages"
_PACKAGES = ("kafka-python",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one outage cost.

    `rss_growth_bytes` is the most that the process had grown at any moment of the outage,
    `offer_p99_ratio` the emit call's p99 during it over the p99 before, `first_ack_s` from the
    brokers' return to their first acknowledgement.
    """

    acknowledged: int
    lost: int
    doubled: int
    rss_growth_bytes: int
    offer_p99_ratio: float
    first_ack_s: float

    def rows(self) -> list[Row]:
        """For the results file."""
        before = "before the outage"
        return [
            Row(metric="acknowledged", value=self.acknowledged, unit="traces"),
            Row(metric="lost", value=self.lost, unit="traces"),
            Row(metric="doubled", value=self.doubled, unit="traces"),
            Row(metric="rss_growth", value=self.rss_growth_bytes, unit="B", against=before),
            Row(metric="offer_p99_ratio", value=self.offer_p99_ratio, unit="ratio", against=before),
            Row(metric="first_ack", value=self.first_ack_s, unit="s", against="brokers' return"),
        ]


def measure(kind: str, outage_s: float, directory: Path) -> Outcome:
    """One outage of `outage_s` seconds, with everything it needs below `directory`."""
    proxied = kind in ("partitioned", "slow")
    with running_kafka(directory / "kafka", proxied=proxied, jvm=JVM) as kafka:
        create_topic(kafka.access, TOPIC, partitions=3, replicas=1, ttl_s=86_400)
        with _traffic(kafka, directory) as (steady, acknowledged):
            steady.start()
            steady.forwards()
            time.sleep(CALM_S)
            calm, resident = len(steady.offers_s), resident_bytes()
            before_s = steady.offer_p99_s()
            heal = _begin(kind, kafka)
            grown = _watch(outage_s, resident)
            during_s = steady.offer_p99_s(calm)
            heal()
            first_ack_s = _until_acknowledged(steady)
            steady.stop()
            found = arrived(kafka.access, TOPIC)
            expected = {
                bytes(acknowledged[at : at + ID_BYTES])
                for at in range(0, len(acknowledged), ID_BYTES)
            }
    return Outcome(
        acknowledged=len(expected),
        lost=len(expected - set(found)),
        doubled=found.total() - len(found),
        rss_growth_bytes=grown,
        offer_p99_ratio=during_s / before_s,
        first_ack_s=first_ack_s,
    )


@contextlib.contextmanager
def _traffic(kafka: Kafka, directory: Path) -> Iterator[tuple[Steady, bytearray]]:
    """The node's side, and the ids of what its log acknowledged, one after the other."""
    acknowledged = bytearray()
    keyring = Keyring.open(directory / "keys", retention=RetentionConfig(), clock=time.time)
    sealer = Sealer(keyring.node_keys(), "node-1", SigningKey(bytes(range(32))), clock=time.time)
    log = SqliteLog(directory / "log", cap_bytes=CAP_BYTES, bucket_s=600, clock=time.time)

    def emitter(log: Log, *, breaker: Breaker) -> Emitter:
        return Emitter(
            sealer,
            log,
            encode=lambda trace: encode_body(trace, RemapTable.identity()),
            queue_traces=256,
            on_drop=lambda reason: None,
            on_ack=acknowledged.extend,
            breaker=breaker,
        )

    steady = Steady(
        log,
        emitter,
        kafka.access,
        TOPIC,
        trace=make_trace(1, positions=POSITIONS, k=K),
        provenance=lambda: replace(make_provenance(), created_s=int(time.time())),
        deadline_s=DEADLINE_S,
        rate_per_s=RATE_PER_S,
    )
    try:
        yield steady, acknowledged
    finally:
        steady.end()
        steady.emitter.close(1)
        log.close()
        keyring.close()


def _begin(kind: str, kafka: Kafka) -> Callable[[], None]:
    """Begin the outage; what is returned ends it, and comes back when the brokers are back."""
    (node,) = kafka.nodes
    if kind == "frozen":
        node.freeze()
        return node.thaw
    if kind == "killed":
        node.kill()

        def restart() -> None:
            node.launch()
            node.wait()

        return restart
    (proxy,) = kafka.proxies
    if kind == "slow":
        proxy.slow(bytes_per_s=SLOW_BYTES_PER_S, delay_s=SLOW_DELAY_S)
    else:
        proxy.cut()
    return proxy.heal


def _watch(outage_s: float, resident: int) -> int:
    """The most that the process grows in `outage_s` seconds."""
    until_s = time.monotonic() + outage_s
    grown = 0
    while time.monotonic() < until_s:
        grown = max(grown, resident_bytes() - resident)
        time.sleep(0.25)
    return grown


def _until_acknowledged(steady: Steady) -> float:
    begun_s, records = time.monotonic(), steady.forwarder.stats().sent_records
    wait_for(lambda: steady.forwarder.stats().sent_records > records)
    return time.monotonic() - begun_s


def main(arguments: Sequence[str]) -> int:
    """Run the bench; returns the exit status, 1 where a trace was lost."""
    parser = argparse.ArgumentParser(prog="bench.faults.outages", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="length of each outage")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument("--results-dir", type=Path, default=RESULTS_DIR)
    options = parser.parse_args(arguments)
    console = Console()
    lost = 0
    for kind in options.kinds:
        directory = Path(tempfile.mkdtemp(prefix="draftkeep-outages-"))
        try:
            outcome = measure(kind, options.seconds, directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)
        lost += outcome.lost
        console.print(f"{kind}: {outcome}")
        append_rows(
            "faults",
            outcome.rows(),
            conditions={
                "outage": kind,
                "outage_s": options.seconds,
                "traces_per_s": RATE_PER_S,
                "deadline_s": DEADLINE_S,
            },
            packages=_PACKAGES,
            clock=time.time,
            directory=options.results_dir,
        )
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
