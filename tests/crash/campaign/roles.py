"""The processes that are killed. Each does one thing until then, with the production's parts."""

import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from draftkeep.cli.compacting import compact_forever
from draftkeep.cli.forwarding import forward_forever
from draftkeep.config import Config
from draftkeep.errors import DraftkeepError, StoreError
from draftkeep.ingest.kafka_group import KafkaGroup
from draftkeep.ingest.record import encode_record
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.ingest.trace import Provenance
from draftkeep.policies.keyring import Keyring
from draftkeep.policies.signing import SigningKey
from draftkeep.serve.sealing import PublishingSealer
from draftkeep.store.catalog import Catalog
from draftkeep.store.rewriter import merge, random_serial, rewrite_erased
from draftkeep.store.storage import open_storage
from draftkeep.store.sweeper import Sweeper
from tests.crash.campaign.acks import AckFile
from tests.crash.campaign.site import DOOMED, DOOMED_PREFIX, TENANT, log_dir
from tests.crash.forking import Child

_TARGET = b"t" * 32
_TOKENIZER = b"k" * 32
_MERGE_BYTES = 4 * 1024**2
_SWEEP_GRACE_S = 0.5
_SESSION_S = 1.5
_EVERY_S = 0.25

_T = TypeVar("_T")
_P = ParamSpec("_P")


def node(config: Config, child: Child) -> None:
    """Seal and append, group after group; what the log acknowledged goes to the witness."""
    keyring = Keyring.open(config.keys_path, retention=config.retention, clock=time.time)
    name = config.serve.node
    sealer = PublishingSealer(
        keyring.node_keys(),
        name,
        SigningKey.load(config.keys_path / f"node-{name}.key"),
        catalog=Catalog.configured(config),
        clock=time.time,
    )
    log = SqliteLog(
        log_dir(config),
        cap_bytes=config.log.cap_bytes,
        bucket_s=config.log.bucket_s,
        clock=time.time,
    )
    acks = AckFile(Path(child.request["acks"]))
    while True:
        group = [_insist(_seal, sealer, child) for _ in range(child.draw.randrange(1, 12))]
        _insist(log.append, [record for record, *_ in group])
        acks.write((trace_id, is_doomed) for _, trace_id, is_doomed in group)
        time.sleep(child.draw.random() * 0.2)


def _seal(sealer: PublishingSealer, child: Child) -> tuple[bytes, bytes, bool]:
    """A record for the log, its trace id, and whether its subject may be erased."""
    subject = _subject(child)
    body = make_body(child.draw.randbytes(child.draw.randrange(2_000, 10_000)))
    provenance = _provenance(subject, child.draw.randbytes(16))
    sealed = sealer.seal(body, provenance, prompt_tokens=3, positions=5)
    is_doomed = subject is not None and subject.startswith(DOOMED_PREFIX)
    return encode_record(sealed), sealed.parsed.trace_id, is_doomed


def _subject(child: Child) -> str | None:
    # One in four is new, so that a kill meets the keyring in the middle of an insert.
    return child.draw.choice(
        [
            None,
            f"known-{child.draw.randrange(20)}",
            f"new-{child.draw.getrandbits(60)}",
            f"{DOOMED_PREFIX}{child.draw.randrange(DOOMED)}",
        ]
    )


def _provenance(subject: str | None, response_id: bytes) -> Provenance:
    return Provenance(
        tenant=TENANT,
        subject=subject,
        response_id=response_id,
        domain="sql",
        consent=0,
        policy_version=1,
        created_s=int(time.time()),
        target=_TARGET,
        tokenizer=_TOKENIZER,
    )


def make_body(payload: bytes) -> bytes:
    """Bytes that say whether they are whole."""
    return zlib.crc32(payload).to_bytes(4, "big") + payload


def is_whole(body: bytes) -> bool:
    """Whether these are bytes that `make_body` made."""
    return body[:4] == zlib.crc32(body[4:]).to_bytes(4, "big")


def forward(config: Config, _child: Child) -> None:
    """What `draftkeep forward` does beside a node, on that node's log."""
    forward_forever(config)


def compact(config: Config, _child: Child) -> None:
    """What `draftkeep compact --every` does, in a group that soon notices who is gone."""
    init: Any = KafkaGroup.__init__
    init.__kwdefaults__["session_s"] = _SESSION_S
    compact_forever(config, every_s=_EVERY_S)


def chores(config: Config, child: Child) -> None:
    """Merge, rewrite and sweep without end, with next to no grace for files that nothing lists."""
    catalog, storage = Catalog.configured(config), open_storage(config)
    sweeper = Sweeper(catalog, storage, clock=time.time, grace_s=_SWEEP_GRACE_S)

    def join() -> None:
        merge(
            catalog,
            storage,
            target_bytes=_MERGE_BYTES,
            now_s=time.time(),
            new_serial=random_serial,
        )

    def rewrite() -> None:
        rewrite_erased(catalog, storage, now_s=time.time(), new_serial=random_serial)

    works = (join, rewrite, sweeper.run_once)
    while True:
        try:
            child.draw.choice(works)()
        except StoreError as error:
            _say(error)
        time.sleep(child.draw.random() * 0.1)


ROLES: dict[str, Callable[[Config, Child], None]] = {
    "node": node,
    "forward": forward,
    "compact": compact,
    "chores": chores,
}


def _insist(act: Callable[_P, _T], *arguments: _P.args, **options: _P.kwargs) -> _T:
    """Repeat until it works: a broker that is away, a database that restarts."""
    while True:
        try:
            return act(*arguments, **options)
        except DraftkeepError as error:
            _say(error)
            time.sleep(0.05)


def _say(error: Exception) -> None:
    print(f"{type(error).__name__}: {error}", flush=True)
