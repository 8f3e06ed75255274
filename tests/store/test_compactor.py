"""Log to shards: what is stored, what is refused and why, and who wins a race."""

import hashlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.errors import ConflictError, StoreError
from draftkeep.ingest import envelope
from draftkeep.ingest.envelope import Sealer, signed_message
from draftkeep.ingest.log import LogRecord
from draftkeep.ingest.record import SealedTrace, encode_record
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.policies.signing import SigningKey
from draftkeep.store import admission, schema
from draftkeep.store.admission import Refusal
from draftkeep.store.catalog import Catalog
from draftkeep.store.compactor import Compactor
from draftkeep.store.dead_letters import requeue_dead_letters
from draftkeep.store.nodes import enrol_node, revoke_node
from draftkeep.store.periods import publish_period
from draftkeep.store.position import forget_position
from draftkeep.store.sweeper import Sweeper
from tests.store.conftest import PERIOD_S, START_S, TTL_S, World, ids


def resign(world: World, sealed: SealedTrace, **header: object) -> SealedTrace:
    """The same record under a changed header, signed by the same node."""
    changed = replace(sealed.parsed, **header).encode()  # type: ignore[arg-type]
    message = signed_message(changed, sealed.nonce, sealed.ciphertext, sealed.commitment)
    return replace(sealed, header=changed, signature=world.signing.sign(message))


def letters(world: World) -> list[tuple[str, int]]:
    row = schema.dead_letters.c
    with world.catalog.read() as connection:
        query = sa.select(row.reason, row.count).order_by(row.id)
        return [(found.reason, found.count) for found in connection.execute(query)]


def test_what_was_sealed_is_stored_once_and_opens(world: World) -> None:
    sealed = [
        world.seal(f"body {index}".encode(), tenant=tenant, subject=subject)
        for index, (tenant, subject) in enumerate(
            [("birch", None), ("acme", "ann"), ("acme", None), ("acme", "bob")]
        )
    ]
    world.append(*sealed)
    report = world.compactor().run_once()
    assert (report.read, report.stored, report.duplicates) == (4, 4, 0)
    assert (report.dead, report.counted, report.gaps) == ({}, {}, ())
    assert world.files() == set(report.shards)
    assert len(report.shards) == 1
    assert {world.opener().open(item) for item in world.stored()} == {
        f"body {index}".encode() for index in range(4)
    }
    assert [item.parsed.tenant for item in world.stored()] == ["acme"] * 3 + ["birch"]
    assert world.log.bounds() == (4, 4)
    assert world.compactor().run_once().read == 0


def test_shards_are_split_by_bucket_and_target(world: World) -> None:
    world.append(world.seal(), world.seal(target=b"U" * 32))
    world.clock.now_s += PERIOD_S
    world.append(world.seal())
    report = world.compactor().run_once()
    assert len(report.shards) == 3
    assert len(ids(world.stored())) == 3
    assert len(world.stored(target=b"U" * 32)) == 1
    with world.catalog.read() as connection:
        buckets = set(connection.scalars(sa.select(schema.shards.c.bucket_s)))
    assert buckets == {START_S + TTL_S, START_S + PERIOD_S + TTL_S}


def test_the_same_bytes_are_stored_once(world: World) -> None:
    first, second = world.seal(), world.seal()
    world.append(first, first, second)
    report = world.compactor().run_once()
    assert (report.stored, report.duplicates) == (2, 1)
    world.append(second, first)
    report = world.compactor().run_once()
    assert (report.stored, report.duplicates, report.shards) == (0, 2, ())
    assert ids(world.stored()) == ids([first, second])
    assert letters(world) == []


def test_other_bytes_under_a_known_id_are_a_conflict(world: World) -> None:
    first = world.seal()
    world.append(first)
    world.compactor().run_once()
    other = resign(world, replace(first, nonce=b"n" * 12))
    world.append(other)
    assert world.compactor().run_once().dead == {"conflict": 1}
    fresh = world.seal()
    world.append(fresh, resign(world, replace(fresh, nonce=b"n" * 12)))
    assert world.compactor().run_once().dead == {"conflict": 1}
    assert ids(world.stored()) == ids([first, fresh])
    assert first in world.stored()


def test_the_same_id_from_two_nodes_is_two_traces(world: World) -> None:
    key = SigningKey.load_or_create(world.root / "keys" / "node-n2.key")
    enrol_node(world.catalog, "n2", key.public, ["acme"], world.clock())
    fixed = b"i" * 16
    sealer = Sealer(world.keyring.node_keys(), "n2", key, clock=world.clock)
    sealed = sealer.seal(b"x", world.provenance(), prompt_tokens=1, positions=1)
    publish_period(world.catalog, world.keyring.ensure_period("acme", world.clock()))
    header = replace(sealed.parsed, trace_id=fixed).encode()
    message = signed_message(header, sealed.nonce, sealed.ciphertext, sealed.commitment)
    of_n2 = replace(sealed, header=header, signature=key.sign(message))
    of_n1 = resign(world, world.seal(), trace_id=fixed)
    world.append(of_n1, of_n2)
    assert world.compactor().run_once().stored == 2
    assert len(world.stored()) == 2


def _unknown_version(world: World) -> bytes:
    return b"\x09" + encode_record(world.seal())[1:]


def _later_header(world: World) -> bytes:
    sealed = world.seal()
    header = bytearray(sealed.header)
    header[header.index(1)] = 2
    return encode_record(replace(sealed, header=bytes(header)))


def _flip_ciphertext(world: World) -> bytes:
    sealed = world.seal()
    return encode_record(replace(sealed, ciphertext=b"\x00" + sealed.ciphertext[1:]))


def _foreign_share(world: World) -> bytes:
    return encode_record(replace(world.seal(), encapsulation=b"e" * 1168))


def _resigned(**header: object) -> Callable[[World], bytes]:
    return lambda world: encode_record(resign(world, world.seal(), **header))


def _other_tenants_period(world: World) -> bytes:
    other = world.seal(tenant="birch").parsed
    return encode_record(resign(world, world.seal(), period_id=other.period_id, alias=other.alias))


REFUSED = {
    "cut record": (lambda world: encode_record(world.seal())[:-1], Refusal.UNREADABLE),
    "empty record": (lambda world: b"", Refusal.UNREADABLE),
    "unknown record version": (_unknown_version, Refusal.UNREADABLE),
    "unknown header version": (_later_header, Refusal.UNREADABLE),
    "unknown node": (_resigned(node="n9"), Refusal.UNKNOWN_NODE),
    "tenant the node may not write for": (_resigned(tenant="cedar"), Refusal.TENANT_NOT_ALLOWED),
    "changed ciphertext": (_flip_ciphertext, Refusal.BAD_SIGNATURE),
    "another encapsulation": (_foreign_share, Refusal.SHARE_MISMATCH),
    "wrong body length": (_resigned(body_bytes=3), Refusal.LENGTH_MISMATCH),
    "period nobody published": (_resigned(period_id=b"q" * 16), Refusal.UNKNOWN_PERIOD),
    "period of another tenant": (_other_tenants_period, Refusal.PERIOD_MISMATCH),
    "later expiry": (_resigned(expiry_s=START_S + TTL_S + 1), Refusal.EXPIRY_MISMATCH),
    "earlier expiry": (_resigned(expiry_s=START_S + TTL_S - 1), Refusal.EXPIRY_MISMATCH),
    "created before": (_resigned(created_s=START_S - 1), Refusal.CREATED_OUTSIDE_PERIOD),
    "created after": (_resigned(created_s=START_S + PERIOD_S), Refusal.CREATED_OUTSIDE_PERIOD),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_record_is_quarantined_and_the_line_goes_on(world: World, case: str) -> None:
    make, reason = REFUSED[case]
    before, after = world.seal(), world.seal()
    bad = make(world)
    world.log.append([encode_record(before), bad, encode_record(after)])
    report = world.compactor(period_s=PERIOD_S).run_once()
    assert (report.stored, report.dead, report.next_offset) == (2, {str(reason): 1}, 3)
    assert ids(world.stored()) == ids([before, after])
    with world.catalog.read() as connection:
        letter = connection.execute(sa.select(schema.dead_letters)).one()
    assert letter.record == bad
    assert letter.sha256 == hashlib.sha256(bad).digest()
    assert (letter.offset, letter.count) == (1, 1)
    assert world.clock() < letter.expiry_s <= world.clock() + 7 * 86400 + 1


def test_without_a_known_period_length_created_is_bounded_by_the_ttl(world: World) -> None:
    inside = resign(world, world.seal(), created_s=START_S + TTL_S // 4 - 1)
    outside = resign(world, world.seal(), created_s=START_S + TTL_S // 4)
    world.append(inside, outside)
    assert world.compactor().run_once().dead == {"created_outside_period": 1}
    assert world.stored() == [inside]


def test_a_revoked_node_is_refused_on_arrival_and_its_old_traces_stay(world: World) -> None:
    first, second = world.seal(b"first"), world.seal()
    world.append(first)
    world.compactor().run_once()
    revoke_node(world.catalog, "n1", world.clock())
    world.append(second)
    assert world.compactor().run_once().dead == {"revoked_node": 1}
    assert [world.opener().open(item) for item in world.stored()] == [b"first"]


def test_a_period_record_nobody_signed_is_not_believed(world: World) -> None:
    sealed = world.seal()
    with world.catalog.begin() as connection:
        connection.execute(sa.update(schema.periods).values(destroy_at_s=START_S + TTL_S - 1))
    world.append(sealed)
    assert world.compactor().run_once().dead == {"untrusted_period": 1}


def test_expired_records_are_counted_and_not_kept(world: World) -> None:
    world.append(world.seal(), world.seal())
    world.clock.now_s = START_S + TTL_S
    report = world.compactor().run_once()
    assert (report.stored, report.counted, report.dead) == (0, {"expired": 2}, {})
    assert letters(world) == []
    with world.catalog.read() as connection:
        row = connection.execute(sa.select(schema.drops)).one()
    assert (row.source, row.reason, row.count) == ("compactor", "expired", 2)


def test_a_shortened_deadline_holds_for_what_was_sealed_before(world: World) -> None:
    early, late = world.seal(), world.seal()
    world.append(early)
    world.compactor().run_once()
    record = world.keyring.ensure_period("acme", world.clock())
    shorter = replace(record, destroy_at_s=START_S + 4 * PERIOD_S)
    issuer = SigningKey.load(world.root / "keys" / "issuer.key")
    publish_period(world.catalog, replace(shorter, signature=issuer.sign(shorter.signed_bytes())))
    world.append(late)
    assert world.compactor().run_once().stored == 1
    assert len(world.stored()) == 2
    world.clock.now_s = START_S + 4 * PERIOD_S
    world.append(resign(world, early, trace_id=b"n" * 16))
    assert world.compactor().run_once().counted == {"expired": 1}
    assert world.stored() == []
    assert world.compactor().rewrite_erased().rows_removed == 2
    assert world.files() == set()


def test_the_same_poison_again_raises_its_count(world: World) -> None:
    for _ in range(3):
        world.log.append([b"poison"])
        world.compactor().run_once()
    assert letters(world) == [("unreadable", 3)]


def test_what_came_before_its_period_was_published_can_be_tried_again(world: World) -> None:
    world.keyring.ensure_period("acme", world.clock())
    sealed = world.sealer.seal(b"x", world.provenance(), prompt_tokens=1, positions=1)
    world.append(sealed)
    assert world.compactor().run_once().dead == {"unknown_period": 1}
    publish_period(world.catalog, world.keyring.ensure_period("acme", world.clock()))
    assert requeue_dead_letters(world.catalog, world.log, Refusal.UNKNOWN_PERIOD) == 1
    assert requeue_dead_letters(world.catalog, world.log, Refusal.UNKNOWN_PERIOD) == 0
    assert world.compactor().run_once().stored == 1
    assert world.stored() == [sealed]
    assert letters(world) == []


def test_the_signature_check_is_the_envelopes(world: World) -> None:
    sealed = world.seal()
    public = world.signing.public
    for record in (
        sealed,
        replace(sealed, nonce=b"n" * 12),
        replace(sealed, commitment=b"c" * 32),
        replace(sealed, signature=b"s" * 64),
        resign(world, sealed, domain="other"),
    ):
        expected = envelope.verify_signature(record, public)
        assert admission._signed(record, public) is expected
    assert admission._signed(sealed, public)


def test_batches_follow_each_other_until_the_log_is_empty(world: World) -> None:
    sealed = [world.seal() for _ in range(7)]
    world.append(*sealed)
    compactor = world.compactor(limit_records=3)
    assert [compactor.run_once().read for _ in range(4)] == [3, 3, 1, 0]
    assert ids(world.stored()) == ids(sealed)


def test_records_the_log_lost_are_a_gap_and_not_the_end(world: World) -> None:
    world.append(*[world.seal() for _ in range(3)])
    world.log.free(2)
    report = world.compactor().run_once()
    assert (report.stored, report.gaps) == (1, ((0, 2),))
    world.append(world.seal(), world.seal())
    world.log.free(5)
    report = world.compactor().run_once()
    assert (report.read, report.gaps, report.next_offset) == (0, ((3, 5),), 5)
    assert world.compactor().run_once().gaps == ()
    with world.catalog.read() as connection:
        found = connection.execute(sa.select(schema.gaps.c.first, schema.gaps.c.next)).all()
    assert found == [(0, 2), (3, 5)]


class OtherLog:
    """A log that is another than it says or holds other offsets than it should."""

    def __init__(self, log: SqliteLog) -> None:
        self._log = log
        self.topic: str | None = None
        self.end: int | None = None
        self.first: int | None = None
        self.skip: set[int] = set()
        self.append, self.free, self.close = log.append, log.free, log.close
        self.size_bytes = log.size_bytes

    def identity(self) -> tuple[str, str, int]:
        cluster, topic, partition = self._log.identity()
        return cluster, self.topic or topic, partition

    def bounds(self) -> tuple[int, int]:
        first, end = self._log.bounds()
        return first if self.first is None else self.first, end if self.end is None else self.end

    def read(self, start: int, limit_records: int, limit_bytes: int) -> list[LogRecord]:
        found = self._log.read(start, limit_records, limit_bytes)
        return [record for record in found if record.offset not in self.skip]


def test_a_topic_made_again_stops_the_compactor(world: World) -> None:
    world.append(world.seal())
    log = OtherLog(world.log)
    world.compactor(log=log).run_once()
    log.topic = "made-again"
    with pytest.raises(StoreError, match="deleted and made again"):
        world.compactor(log=log).run_once()
    assert forget_position(world.catalog, log.identity()[0]) == 1
    world.append(world.seal())
    assert world.compactor(log=log).run_once().stored == 1


def test_a_log_that_ends_below_the_stored_offset_stops_the_compactor(world: World) -> None:
    world.append(world.seal(), world.seal())
    log = OtherLog(world.log)
    world.compactor(log=log).run_once()
    log.first, log.end = 0, 1
    with pytest.raises(StoreError, match="ends at offset 1, below the stored 2"):
        world.compactor(log=log).run_once()


def test_a_hole_inside_a_batch_is_a_gap(world: World) -> None:
    world.append(*[world.seal() for _ in range(5)])
    log = OtherLog(world.log)
    log.skip = {1, 2}
    report = world.compactor(log=log).run_once()
    assert (report.read, report.stored, report.gaps) == (3, 3, ((1, 3),))


def test_of_two_compactors_on_one_log_one_wins(world: World) -> None:
    sealed = [world.seal() for _ in range(3)]
    world.append(*sealed)

    def token() -> str:
        world.compactor(new_token=lambda: "rival").run_once()
        return "late"

    with pytest.raises(ConflictError, match="another compactor moved this log"):
        world.compactor(new_token=token).run_once()
    assert ids(world.stored()) == ids(sealed)
    assert len(world.files()) == 1
    assert "rival" in next(iter(world.files()))
    assert world.compactor().run_once().read == 0


def test_one_trace_in_two_logs_at_once_is_stored_once(world: World) -> None:
    both, only_here, only_there = world.seal(), world.seal(), world.seal()
    world.append(both, only_here)
    other = SqliteLog(world.root / "log2", cap_bytes=1 << 30, bucket_s=600, clock=world.clock)
    other.append([encode_record(both), encode_record(only_there)])
    tokens = []

    def token() -> str:
        if not tokens:
            assert world.compactor(log=other, new_token=lambda: "rival").run_once().stored == 2
        tokens.append("x" * (len(tokens) + 1))
        return tokens[-1]

    report = world.compactor(new_token=token).run_once()
    assert (report.stored, report.duplicates) == (1, 1)
    assert len(tokens) == 2
    assert ids(world.stored()) == ids([both, only_here, only_there])
    assert len(world.files()) == 2
    other.close()


class HookedCatalog(Catalog):
    """A catalog that runs something before its next write transaction."""

    hook: Callable[[], object] | None = None

    @contextmanager
    def begin(self) -> Iterator[Connection]:
        hook, self.hook = self.hook, None
        if hook is not None:
            hook()
        with super().begin() as connection:
            yield connection


def test_a_file_swept_before_its_commit_is_never_listed(world: World) -> None:
    sealed = world.seal()
    world.append(sealed)
    catalog = HookedCatalog(world.catalog.engine)
    sweeper = Sweeper(world.catalog, world.shards_dir, clock=world.clock, grace_s=0.0)
    catalog.hook = sweeper.run_once
    with pytest.raises(ConflictError, match="swept before it was committed"):
        world.compactor(catalog=catalog).run_once()
    assert world.files() == set()
    assert world.stored() == []
    assert world.compactor(catalog=catalog).run_once().stored == 1
    assert world.stored() == [sealed]


def test_a_file_within_its_grace_is_left_to_its_writer(world: World) -> None:
    world.append(world.seal())
    catalog = HookedCatalog(world.catalog.engine)
    forever = Sweeper(world.catalog, world.shards_dir, clock=world.clock, grace_s=10**10)
    catalog.hook = forever.run_once
    assert world.compactor(catalog=catalog).run_once().stored == 1


COMPACT = """
import builtins, io, os, sys
from pathlib import Path
root, issuer, now = Path(sys.argv[1]), bytes.fromhex(sys.argv[2]), float(sys.argv[3])
opened = []
sys.addaudithook(lambda name, args: opened.append(str(args[0])) if name == "open" else None)
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.store.audit import AuditSession
from draftkeep.store.catalog import Catalog
from draftkeep.store.compactor import Compactor
from draftkeep.store.sweeper import Sweeper
log = SqliteLog(root / "log", cap_bytes=1 << 30, bucket_s=600, clock=lambda: now)
catalog = Catalog.open(root / "catalog.db")
compactor = Compactor(
    log, catalog, root / "shards", clock=lambda: now, issuer_public=issuer, period_s=3600
)
print(compactor.run_once().stored)
compactor.merge(1 << 20)
compactor.rewrite_erased()
Sweeper(catalog, root / "shards", clock=lambda: now).run_once()
with AuditSession(catalog, root / "shards", now_s=now) as session:
    print(session.query("SELECT count(*) FROM traces").rows[0][0])
log.close()
catalog.close()
holders = ["policies.keyring", "policies.kek", "policies.job_keys", "policies.node_keys"]
holders += ["policies.subject_rows", "policies.issuer", "ingest.envelope"]
print([name for name in holders if f"draftkeep.{name}" in sys.modules])
print([path for path in opened if "/keys" in path])
"""


def test_compactor_sweeper_and_audit_run_where_no_key_is(world: World) -> None:
    sealed = [world.seal(b"secret") for _ in range(5)]
    world.append(*sealed)
    world.log.close()
    hidden = world.root / "elsewhere"
    (world.root / "keys").rename(hidden)
    arguments = [str(world.root), world.keyring.issuer_public.hex(), str(world.clock())]
    done = subprocess.run(
        [sys.executable, "-c", COMPACT, *arguments], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == ["5", "5", "[]", "[]"]
    hidden.rename(world.root / "keys")
    assert {world.opener().open(item) for item in world.stored()} == {b"secret"}


def test_small_shards_of_one_bucket_become_one(world: World) -> None:
    sealed = []
    for _ in range(4):
        sealed.append(world.seal(b"b" * 1000))
        world.append(sealed[-1])
        world.compactor().run_once()
    world.clock.now_s += PERIOD_S
    late = world.seal()
    world.append(late)
    world.compactor().run_once()
    assert len(world.files()) == 5
    report = world.compactor().merge(10**6)
    assert (report.replaced, report.written, report.rows_removed) == (4, 1, 0)
    assert report.bytes_freed > 3 * 1168
    assert len(world.files()) == 2
    assert ids(world.stored()) == ids([*sealed, late])
    assert world.compactor().merge(10**6).replaced == 0
    world.append(sealed[0])
    assert world.compactor().run_once().duplicates == 1


def test_merging_keeps_to_the_size_asked_for(world: World) -> None:
    for _ in range(6):
        world.append(world.seal(b"b" * 3000))
        world.compactor().run_once()
    sizes = [path.stat().st_size for path in world.shards_dir.iterdir()]
    report = world.compactor().merge(sum(sizes[:3]) + 10)
    assert (report.replaced, report.written) == (6, 2)
    assert len(world.stored()) == 6
    assert world.compactor().merge(min(sizes)).replaced == 0


def test_a_shard_replaced_by_another_process_is_left_to_it(world: World) -> None:
    for _ in range(2):
        world.append(world.seal())
        world.compactor().run_once()

    def token() -> str:
        world.compactor(new_token=lambda: "rival").merge(10**6)
        return "late"

    with pytest.raises(ConflictError, match="replaced"):
        world.compactor(new_token=token).merge(10**6)
    assert len(world.files()) == 1
    assert len(world.stored()) == 2


def test_paths_may_hold_spaces_and_more(tmp_path: Path, world: World) -> None:
    world.append(world.seal())
    directory = tmp_path / "my shards #1"
    compactor = Compactor(
        world.log,
        world.catalog,
        directory,
        clock=world.clock,
        issuer_public=world.keyring.issuer_public,
    )
    (name,) = compactor.run_once().shards
    assert (directory / name).exists()
