"""The warm process of `test_crash`, with the model loaded: forks servers and compactors.

Nothing here may start a thread (see `forking`). Hence one torch thread, and no forward pass before
the fork.
"""

import json
import os
import random
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftkeep.config import RetentionConfig
from draftkeep.errors import DraftkeepError, StoreError
from draftkeep.ingest.codec import encode_body
from draftkeep.ingest.emitter import Emitter
from draftkeep.ingest.log_reader import LogReader
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.ingest.tables import RemapTable
from draftkeep.ingest.trace import Provenance
from draftkeep.kernels.sampling import Sampling
from draftkeep.policies.keyring import Keyring
from draftkeep.policies.signing import SigningKey
from draftkeep.serve.capture import Capture
from draftkeep.serve.engine.drafting import DraftModel
from draftkeep.serve.engine.engine import Engine
from draftkeep.serve.engine.lookahead import Speculation
from draftkeep.serve.engine.request import Request
from draftkeep.serve.sealing import PublishingSealer
from draftkeep.store.catalog import Catalog
from draftkeep.store.compactor import Compactor
from draftkeep.store.models.drafter import cold_drafter
from draftkeep.store.models.target import TargetModel, load_target
from draftkeep.store.rewriter import merge, random_serial, rewrite_erased
from draftkeep.store.storage_local import LocalStorage
from draftkeep.store.sweeper import Sweeper
from tests.crash.forking import serve_forks


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What every child is told: the directories, the fixed clock, where acknowledgements go."""

    state_dir: Path
    keys_dir: Path
    issuer_public: bytes
    now_s: int
    witness_fd: int

    @property
    def log_dir(self) -> Path:
        return self.state_dir / "log"

    @property
    def shards_dir(self) -> Path:
        return self.state_dir / "shards"

    @property
    def storage(self) -> LocalStorage:
        return LocalStorage(self.shards_dir)


def serve(job: Job, draw: random.Random, target: TargetModel, drafter: DraftModel) -> None:
    """The real engine under steady traffic, with capture; every slot is always in use."""
    catalog = Catalog.open(job.state_dir / "catalog.db")
    capture = Capture(
        _emitter(job, catalog),
        context_tokens=64,
        chat_template_hash=target.chat_template_hash,
        on_problem=lambda _kind, error: traceback.print_exception(error),
    )
    engine = Engine(
        target.model,
        slots=4,
        max_context=128,
        speculation=Speculation(mode="fixed", lookahead=3),
        capture_k=16,
        capture_branches=True,
        on_finish=capture.finished,
        packing="never",
    )
    engine.swap(drafter)
    while True:
        while engine.stats().waiting < engine.slots:
            engine.submit(_request(job, draw, target, capture))
        engine.step()


def _request(job: Job, draw: random.Random, target: TargetModel, capture: Capture) -> Request:
    # One subject in three is new, so that a kill meets the keyring in the middle of an insert.
    subject = draw.choice([None, f"known-{draw.randrange(20)}", f"new-{draw.getrandbits(60)}"])
    provenance = Provenance(
        tenant="acme",
        subject=subject,
        response_id=draw.randbytes(16),
        domain="sql",
        consent=0,
        policy_version=1,
        created_s=job.now_s,
        target=target.target_fingerprint,
        tokenizer=target.tokenizer_fingerprint,
    )
    delivery = capture.admit(provenance)
    assert delivery is not None
    # Nobody waits for the answer: the trace leaves as soon as the request has finished.
    delivery.deliver()
    return Request(
        request_id=draw.randbytes(16).hex(),
        prompt_ids=tuple(draw.randrange(3, target.vocab) for _ in range(draw.randrange(2, 40))),
        sampling=Sampling(temperature=draw.choice([0.0, 1.0])),
        seed=draw.getrandbits(64),
        max_tokens=draw.randrange(1, 16),
        on_tokens=lambda _emission: None,
        on_error=_fail,
        tag=delivery,
    )


def _fail(error: DraftkeepError) -> None:
    traceback.print_exception(error)
    os._exit(1)


def _emitter(job: Job, catalog: Catalog) -> Emitter:
    """The emitter of a serving node, whose acknowledgements reach the witness at once."""

    def clock() -> float:
        return float(job.now_s)

    def acknowledge(trace_id: bytes) -> None:
        os.write(job.witness_fd, trace_id.hex().encode() + b"\n")

    keyring = Keyring.open(job.keys_dir, retention=RetentionConfig(), clock=clock)
    signing = SigningKey.load(job.keys_dir / "node-node-1.key")
    table = RemapTable.identity()
    return Emitter(
        PublishingSealer(keyring.node_keys(), "node-1", signing, catalog=catalog, clock=clock),
        SqliteLog(job.log_dir, cap_bytes=2**28, bucket_s=1, clock=time.time),
        encode=lambda trace: encode_body(trace, table),
        queue_traces=64,
        on_drop=lambda reason: None if reason == "queue_full" else _complain(reason),
        on_ack=acknowledge,
    )


def _complain(reason: str) -> None:
    print(f"dropped: {reason}", flush=True)


def compact(job: Job, draw: random.Random) -> None:
    """The real compactor, merging, rewriting and sweeping now and then, without any key."""
    _forbid(job.keys_dir)
    log = _await_log(job.log_dir)
    catalog = Catalog.open(job.state_dir / "catalog.db")
    compactor = Compactor(
        log,
        catalog,
        job.storage,
        clock=lambda: float(job.now_s),
        issuer_public=job.issuer_public,
        limit_records=20,
    )
    sweeper = Sweeper(catalog, job.storage, clock=time.time, grace_s=0.0)
    while True:
        report = compactor.run_once()
        if draw.random() < 0.1:
            merge(
                catalog,
                job.storage,
                target_bytes=2**20,
                now_s=job.now_s,
                new_serial=random_serial,
            )
        if draw.random() < 0.1:
            rewrite_erased(catalog, job.storage, now_s=job.now_s, new_serial=random_serial)
        if draw.random() < 0.05:
            sweeper.run_once()
        if report.read == 0:
            time.sleep(0.002)


def _await_log(directory: Path) -> LogReader:
    while True:
        try:
            return SqliteLog.open_reader(directory)
        except StoreError:
            time.sleep(0.002)


def _forbid(keys_dir: Path) -> None:
    """End the process with an error when it opens anything under `keys_dir`."""

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "sqlite3.connect", "os.listdir", "os.scandir") and str(
            keys_dir
        ) in str(arguments[0]):
            raise PermissionError("the compactor opened a file of the keyring")

    sys.addaudithook(check)


def main(arguments: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    target = load_target("tiny")
    cold = cold_drafter(target, layers=1, vocab=256)
    drafter = DraftModel(model=cold.model, vocab_ids=cold.vocab_ids, digest=b"d" * 32)
    job = Job(
        state_dir=Path(arguments["state_dir"]),
        keys_dir=Path(arguments["keys_dir"]),
        issuer_public=bytes.fromhex(arguments["issuer_public"]),
        now_s=arguments["now_s"],
        witness_fd=arguments["witness_fd"],
    )
    serve_forks(
        {
            "serve": lambda child: serve(job, child.draw, target, drafter),
            "compact": lambda child: compact(job, child.draw),
        },
        {"target": target.target_fingerprint.hex()},
    )


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
