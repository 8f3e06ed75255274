"""Log to shards: what is stored, what is refused and why, and who wins a race."""

import gc
import hashlib
from collections.abc import Callable
from dataclasses import replace

import cbor2
import pytest
import sqlalchemy as sa

from draftkeep.config import MIN_PERIODS_PER_TTL
from draftkeep.errors import StoreError
from draftkeep.ingest.envelope import Sealer, signed_message
from draftkeep.ingest.header import Header
from draftkeep.ingest.record import SealedTrace, encode_record, read_record
from draftkeep.policies.signing import SigningKey
from draftkeep.store import admission, schema
from draftkeep.store.admission import Refusal
from draftkeep.store.nodes import enrol_node, revoke_node
from draftkeep.store.periods import publish_period
from tests.deployment import PERIOD_S, START_S, TTL_S
from tests.store.conftest import World, ids, resign


def letters(world: World) -> list[tuple[str, int]]:
    row = schema.dead_letters.c
    with world.catalog.read() as connection:
        query = sa.select(row.reason, row.count).order_by(row.id)
        return [(reason, count) for reason, count in connection.execute(query)]


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


def _endless_version(world: World) -> bytes:
    """A number with more digits than Python turns into text."""
    header = cbor2.dumps([10**5000], canonical=True)
    return encode_record(replace(world.seal(), header=header))


def _flip_ciphertext(world: World) -> bytes:
    sealed = world.seal()
    return encode_record(replace(sealed, ciphertext=sealed.ciphertext[::-1]))


def _foreign_share(world: World) -> bytes:
    return encode_record(replace(world.seal(), encapsulation=b"e" * 1168))


def _resigned(**header: object) -> Callable[[World], bytes]:
    return lambda world: encode_record(resign(world, world.seal(), **header))


def _other_tenants_period(world: World) -> bytes:
    other = world.seal(tenant="birch").parsed
    return encode_record(resign(world, world.seal(), period_id=other.period_id, alias=other.alias))


REFUSED: dict[str, tuple[Callable[[World], bytes], Refusal]] = {
    "cut record": (lambda world: encode_record(world.seal())[:-1], Refusal.UNREADABLE),
    "empty record": (lambda world: b"", Refusal.UNREADABLE),
    "unknown record version": (_unknown_version, Refusal.UNREADABLE),
    "unknown header version": (_later_header, Refusal.UNREADABLE),
    "endless header version": (_endless_version, Refusal.UNREADABLE),
    "NUL in the tenant": (_resigned(tenant="ac\0me"), Refusal.UNREADABLE),
    "NUL in the node": (_resigned(node="\0"), Refusal.UNREADABLE),
    "NUL in the domain": (_resigned(domain="code\0"), Refusal.UNREADABLE),
    "endless tenant": (_resigned(tenant="a" * 256), Refusal.UNREADABLE),
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
    "created after": (
        _resigned(created_s=START_S + TTL_S // MIN_PERIODS_PER_TTL),
        Refusal.CREATED_OUTSIDE_PERIOD,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_record_is_quarantined_and_the_line_goes_on(world: World, case: str) -> None:
    make, reason = REFUSED[case]
    row = schema.dead_letters.c
    before, after = world.seal(), world.seal()
    bad = make(world)
    world.log.append([encode_record(before), bad, encode_record(after)])
    report = world.compactor().run_once()
    assert (report.stored, report.dead, report.next_offset) == (2, {str(reason): 1}, 3)
    assert ids(world.stored()) == ids([before, after])
    with world.catalog.read() as connection:
        letter = connection.execute(
            sa.select(row.record, row.sha256, row.offset, row.expiry_s)
        ).one()
    assert letter[:3] == (bad, hashlib.sha256(bad).digest(), 1)
    assert world.clock() < letter.expiry_s <= world.clock() + 7 * 86400 + 1
    assert letters(world) == [(str(reason), 1)]


def test_a_batch_that_fails_leaves_the_cycle_collector_as_it_was(world: World) -> None:
    world.append(world.seal())
    before = world.files()

    def fail() -> str:
        assert not gc.isenabled()
        raise StoreError("no name")

    with pytest.raises(StoreError, match="no name"):
        world.compactor(new_serial=fail).run_once()
    assert gc.isenabled()
    assert world.files() == before
    assert world.compactor().run_once().stored == 1


def test_a_fault_of_the_decoder_stops_nobody(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world.append(world.seal(), *[world.seal(b"a much longer body") for _ in range(2)])

    def faulty(data: bytes) -> tuple[SealedTrace, Header]:
        sealed, header = read_record(data)
        if header.body_bytes > 10:
            raise KeyError("content")
        return sealed, header

    monkeypatch.setattr(admission, "read_record", faulty)
    report = world.compactor().run_once()
    assert (report.stored, report.dead, report.next_offset) == (1, {"unreadable": 2}, 3)
    (said,) = [record for record in caplog.records if record.name.startswith("draftkeep.")]
    assert "KeyError" in said.getMessage()
    with world.catalog.read() as connection:
        details = set(connection.scalars(sa.select(schema.dead_letters.c.detail)))
    assert details == {"the decoder failed (KeyError)"}
    assert "content" not in caplog.text


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
        (row,) = connection.execute(sa.select(schema.drops)).all()
    hour_s = START_S + TTL_S
    assert row == ("compactor", "expired", hour_s, 2)


def test_what_says_itself_that_it_expired_is_not_kept_whoever_sent_it(world: World) -> None:
    world.append(resign(world, world.seal(), node="n9"))
    world.clock.now_s = START_S + TTL_S
    assert world.compactor().run_once().counted == {"expired": 1}
    assert letters(world) == []


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
    assert world.rewrite_erased().rows_removed == 2
    assert world.files() == set()


def test_the_same_poison_again_raises_its_count(world: World) -> None:
    for _ in range(3):
        world.log.append([b"poison"])
        world.compactor().run_once()
    assert letters(world) == [("unreadable", 3)]
