"""A process that compacts its share of a topic as a member of a group, until SIGTERM.

It prints the totals of every round that did something. Where `freeze_file` exists it removes it and
stops itself between a batch's reading and its commit, as if frozen at the worst moment.
"""

import json
import os
import signal
import sys
import threading
from dataclasses import asdict, dataclass
from pathlib import Path

from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.ingest.kafka_group import KafkaGroup
from draftkeep.ingest.kafka_log import KafkaLog
from draftkeep.store.catalog import Catalog
from draftkeep.store.compactor import Compactor
from draftkeep.store.compactor_group import CompactorGroup, totals
from draftkeep.store.rewriter import random_serial
from draftkeep.store.storage_local import LocalStorage

# The least that a broker allows by default.
SESSION_S = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """What a member needs to know; its command line is this as JSON."""

    servers: list[str]
    topic: str
    group: str
    catalog_url: str
    shards_dir: str
    issuer_public: str
    now_s: float
    freeze_file: str

    def command(self) -> list[str]:
        """How to start it."""
        return [sys.executable, "-m", "tests.store.group_member", json.dumps(asdict(self))]

    def run(self) -> None:
        """Until SIGTERM."""
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        access = KafkaAccess(servers=tuple(self.servers))
        catalog = Catalog.connect(self.catalog_url)

        def compactor(partition: int) -> Compactor:
            return Compactor(
                KafkaLog(access, self.topic, partition=partition),
                catalog,
                LocalStorage(Path(self.shards_dir)),
                clock=lambda: self.now_s,
                issuer_public=bytes.fromhex(self.issuer_public),
                new_serial=self._serial,
                free=False,
                limit_records=7,
            )

        with KafkaGroup(access, self.topic, self.group, session_s=SESSION_S) as group:
            compactors = CompactorGroup(compactor, committed=group.commit)
            while not stop.is_set():
                done = compactors.run_round(group.assigned, stopped=stop.is_set)
                if done.failures():
                    raise done.failures()[0]
                if any(totals(done).values()):
                    print(json.dumps(totals(done)), flush=True)
                stop.wait(0.1)
            compactors.close()
        catalog.close()

    def _serial(self) -> str:
        try:
            Path(self.freeze_file).unlink()
        except FileNotFoundError:
            return random_serial()
        os.kill(os.getpid(), signal.SIGSTOP)
        return random_serial()


if __name__ == "__main__":
    Member(**json.loads(sys.argv[1])).run()
