"""Seal and open through a real keyring; everything that must be refused is."""

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftkeep.config import RetentionConfig
from draftkeep.errors import DeniedError, EnvelopeError, KeyDestroyedError, StoreError
from draftkeep.ingest import envelope
from draftkeep.ingest.envelope import Opener, Sealer
from draftkeep.ingest.record import SealedTrace, decode_record, encode_record
from draftkeep.ingest.trace import Provenance
from draftkeep.policies import names
from draftkeep.policies.keyring import JobKeys, Keyring, NodeKeys
from draftkeep.policies.signing import SigningKey

START_S = 1_800_000_000
RETENTION = RetentionConfig(period_s=100, ttl_s=400)
BODY = b"the body, which the envelope does not look at"
NODE = SigningKey(b"\x07" * 32)
OTHER_NODE = SigningKey(b"\x08" * 32)
ENROLLED = {"node-1": NODE.public, "node-2": OTHER_NODE.public}


@dataclass(kw_only=True)
class World:
    directory: Path
    now_s: float = START_S + 5.0

    def __post_init__(self) -> None:
        self.keyring = Keyring.open(self.directory, retention=RETENTION, clock=self.clock)
        self.sealer = self.sealer_of("node-1", NODE)
        self.opener = Opener(self.keyring.job_keys(), ENROLLED.get, clock=self.clock)

    def clock(self) -> float:
        return self.now_s

    def sealer_of(self, node: str, key: SigningKey, keys: NodeKeys | None = None) -> Sealer:
        return Sealer(keys or self.keyring.node_keys(), node, key, clock=self.clock)

    def provenance(self, subject: str | None = "bob", tenant: str = "acme") -> Provenance:
        return Provenance(
            tenant=tenant,
            subject=subject,
            response_id=bytes(range(16)),
            domain="sql",
            consent=1,
            policy_version=3,
            created_s=int(self.now_s),
            target=b"\x01" * 32,
            tokenizer=b"\x02" * 32,
        )

    def seal(self, subject: str | None = "bob", tenant: str = "acme") -> SealedTrace:
        provenance = self.provenance(subject, tenant)
        return self.sealer.seal(BODY, provenance, prompt_tokens=7, positions=21)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(directory=tmp_path / "keys")
    yield world
    world.keyring.close()


@pytest.fixture(scope="module")
def steady(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, SealedTrace]]:
    """A world that no test changes, and one trace in it."""
    world = World(directory=tmp_path_factory.mktemp("steady"))
    yield world, world.seal()
    world.keyring.close()


@pytest.mark.parametrize("subject", ["bob", None])
def test_what_is_sealed_opens_and_says_what_it_is(world: World, subject: str | None) -> None:
    sealed = world.seal(subject)
    assert world.opener.open(decode_record(encode_record(sealed))) == BODY
    assert envelope.verify_signature(sealed, NODE.public)
    header, record = sealed.parsed, world.keyring.periods()[0]
    lookup_key = world.keyring.lookup_key("acme")
    assert header.request_id == names.request_id(lookup_key, bytes(range(16)))
    assert (header.period_id, header.expiry_s) == (record.period_id, record.destroy_at_s)
    assert (header.tenant, header.node, header.domain) == ("acme", "node-1", "sql")
    assert (header.subject_kind, header.origin) == (0 if subject is None else 1, 0)
    assert (header.prompt_tokens, header.positions, header.body_bytes) == (7, 21, len(BODY))
    assert (header.consent, header.policy_version, header.parent_trace_id) == (1, 3, None)
    everything = encode_record(sealed)
    assert BODY not in everything
    assert b"bob" not in everything


def test_traces_of_a_period_share_an_encapsulation_and_nothing_else(world: World) -> None:
    first, second = world.seal(), world.seal()
    assert first.encapsulation == second.encapsulation
    assert first.parsed.alias == second.parsed.alias
    assert first.parsed.request_id == second.parsed.request_id
    for name in ("header", "nonce", "ciphertext", "commitment", "signature"):
        assert getattr(first, name) != getattr(second, name)
    other = world.sealer_of("node-2", OTHER_NODE).seal(
        BODY, world.provenance(), prompt_tokens=1, positions=1
    )
    assert other.encapsulation != first.encapsulation
    world.now_s = START_S + 100
    later = world.seal()
    assert later.parsed.share_id != first.parsed.share_id
    assert later.parsed.alias != first.parsed.alias
    assert all(world.opener.open(sealed) == BODY for sealed in (first, second, other, later))


def test_a_late_trace_is_sealed_in_its_own_period_under_a_share_of_its_own(world: World) -> None:
    early, provenance = world.seal(), world.provenance()
    world.now_s = START_S + 101
    late = [world.sealer.seal(BODY, provenance, prompt_tokens=1, positions=1) for _ in range(2)]
    assert {sealed.parsed.period_id for sealed in late} == {early.parsed.period_id}
    assert len({sealed.parsed.share_id for sealed in (early, *late)}) == 3
    assert all(world.opener.open(sealed) == BODY for sealed in late)


def test_threads_share_one_share(world: World) -> None:
    with ThreadPoolExecutor(8) as pool:
        sealed = list(pool.map(lambda i: world.seal(f"s{i % 3}"), range(60)))
    assert len({trace.encapsulation for trace in sealed}) == 1
    assert len({trace.parsed.trace_id for trace in sealed}) == 60
    assert all(world.opener.open(trace) == BODY for trace in sealed)


def test_the_held_out_bit_follows_the_subject(world: World) -> None:
    lookup_key = world.keyring.lookup_key("acme")
    for subject in [None, *(f"s{i}" for i in range(40))]:
        provenance = world.provenance(subject)
        request_id = names.request_id(lookup_key, provenance.response_id)
        expected = names.held_out(lookup_key, subject, request_id)
        assert world.sealer.held_out(provenance) is expected


def test_after_the_deadline_by_the_clock_nothing_opens_or_seals(world: World) -> None:
    sealed, provenance = world.seal(), world.provenance()
    world.now_s = START_S + 399.9
    assert world.opener.open(sealed) == BODY
    world.now_s = START_S + 400
    with pytest.raises(KeyDestroyedError):
        world.opener.open(sealed)
    with pytest.raises(KeyDestroyedError):
        world.sealer.seal(BODY, provenance, prompt_tokens=1, positions=1)
    world.now_s = START_S + 5
    world.keyring.destroy_expired(START_S + 400)
    with pytest.raises(KeyDestroyedError):  # the clock may lie, the key is gone
        world.opener.open(sealed)


def test_a_group_opens_as_its_traces_do_one_by_one(world: World) -> None:
    """Each by itself: what is forged, erased or damaged keeps nothing else from opening."""
    erased = world.seal("eve")
    world.keyring.destroy_subject("acme", "eve")
    good = [world.seal(), world.seal(None)]
    forged = replace(world.seal(), signature=bytes(64))
    stranger = world.sealer_of("node-9", NODE).seal(
        BODY, world.provenance(), prompt_tokens=1, positions=1
    )
    damaged = replace(world.seal(), commitment=bytes(32))
    group = [erased, good[0], forged, stranger, damaged, good[1]]
    found = world.opener.open_all(group)
    for sealed, got in zip(group, found, strict=True):
        if sealed in good:
            assert got == BODY
        else:
            assert isinstance(got, EnvelopeError | KeyDestroyedError)
            with pytest.raises(type(got), match=re.escape(str(got))):
                world.opener.open(sealed)
            assert (got.__traceback__, got.__context__) == (None, None)

    def away(name: str) -> bytes | None:
        raise StoreError("the catalog is away")

    with pytest.raises(StoreError, match="the catalog is away"):
        Opener(world.keyring.job_keys(), away, clock=world.clock).open_all(group)


def test_after_erasure_the_subject_s_traces_open_nowhere_and_others_do(world: World) -> None:
    bob, eve, nobody = world.seal("bob"), world.seal("eve"), world.seal(None)
    assert world.opener.open(bob) == BODY
    world.keyring.destroy_subject("acme", "bob")
    with pytest.raises(KeyDestroyedError):
        world.opener.open(bob)
    assert world.opener.open(eve) == world.opener.open(nobody) == BODY
    again = world.seal("bob")
    assert world.opener.open(again) == BODY
    assert again.parsed.alias != bob.parsed.alias


def test_separate_roles_on_separate_secrets(world: World) -> None:
    record = world.keyring.ensure_period("acme", START_S)
    kek = world.directory / "period.kek"
    secret = kek.read_bytes()
    kek.unlink()
    node = NodeKeys.open(world.directory, retention=RETENTION, clock=world.clock)
    sealer = world.sealer_of("node-1", NODE, node)
    sealed = sealer.seal(BODY, world.provenance(), prompt_tokens=1, positions=1)
    world.now_s = START_S + 100
    with pytest.raises(DeniedError):  # nobody has made this period
        sealer.seal(BODY, world.provenance(), prompt_tokens=1, positions=1)
    kek.write_bytes(secret)
    job = JobKeys.open(world.directory, clock=world.clock)
    assert Opener(job, ENROLLED.get, clock=world.clock).open(sealed) == BODY
    assert job.period(sealed.parsed.period_id) == record
    node.close()
    job.close()


def test_an_ended_period_s_share_and_stale_keys_leave_memory(world: World) -> None:
    world.seal()
    assert len(world.sealer._shares) == 1
    world.now_s = START_S + 100
    world.sealer.sweep()
    assert world.sealer._shares == {}
    assert not world.keyring.node_keys()._subjects._values


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_any_flipped_bit_in_any_field_is_refused(
    data: st.DataObject, steady: tuple[World, SealedTrace]
) -> None:
    world, sealed = steady
    name = data.draw(st.sampled_from([field.name for field in fields(sealed) if field.init]))
    value = bytearray(getattr(sealed, name))
    value[data.draw(st.integers(0, len(value) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    changes: dict[str, Any] = {name: bytes(value)}
    with pytest.raises(EnvelopeError):
        world.opener.open(replace(sealed, **changes))


FORGED: dict[str, Any] = {
    "tenant": "other",
    "node": "node-2",
    "trace_id": bytes(16),
    "request_id": bytes(16),
    "alias": bytes(16),
    "period_id": bytes(16),
    "share_id": bytes(16),
    "target": bytes(32),
    "tokenizer": bytes(32),
    "created_s": START_S - 1,
    "expiry_s": START_S + 10**6,
    "consent": 2,
    "policy_version": 4,
    "origin": 1,
    "parent_trace_id": bytes(16),
    "domain": None,
    "prompt_tokens": 8,
    "positions": 22,
    "body_bytes": 1,
    "ext": b"x",
    "subject_kind": 0,
}


@pytest.mark.parametrize("name", sorted(FORGED))
def test_an_enrolled_node_cannot_relabel_a_trace(
    name: str, steady: tuple[World, SealedTrace]
) -> None:
    """Signed again, so that only the seal itself, or the keys, can object."""
    world, sealed = steady
    world.keyring.node_keys().period_at("other", START_S)
    signer = OTHER_NODE if name == "node" else NODE
    forged = _resign(sealed, signer, header=replace(sealed.parsed, **{name: FORGED[name]}).encode())
    with pytest.raises((EnvelopeError, KeyDestroyedError)):
        world.opener.open(forged)


@pytest.mark.parametrize("name", ["nonce", "ciphertext", "commitment"])
def test_an_enrolled_node_cannot_alter_a_body(name: str, steady: tuple[World, SealedTrace]) -> None:
    world, sealed = steady
    value = bytearray(getattr(sealed, name))
    for at in range(len(value)):
        value[at] ^= 0x40
        with pytest.raises(EnvelopeError, match=r"commitment|open"):
            world.opener.open(_resign(sealed, NODE, **{name: bytes(value)}))
        value[at] ^= 0x40


def test_another_share_subject_period_tenant_or_node_does_not_open(world: World) -> None:
    sealed, eve, other = world.seal("bob"), world.seal("eve"), world.seal("bob", "other")
    world.now_s = START_S + 100
    later = world.seal("bob")
    swaps = [
        replace(sealed.parsed, alias=eve.parsed.alias),
        replace(sealed.parsed, period_id=later.parsed.period_id, alias=later.parsed.alias),
        replace(sealed.parsed, period_id=other.parsed.period_id, alias=other.parsed.alias),
        replace(sealed.parsed, tenant="other", period_id=other.parsed.period_id),
    ]
    for header in swaps:
        with pytest.raises((EnvelopeError, KeyDestroyedError)):
            world.opener.open(_resign(sealed, NODE, header=header.encode()))
    encoded = replace(sealed.parsed, share_id=later.parsed.share_id).encode()
    moved = replace(sealed, encapsulation=later.encapsulation)
    with pytest.raises(EnvelopeError):
        world.opener.open(_resign(moved, NODE, header=encoded))
    assert world.opener.open(sealed) == BODY


def test_strangers_and_false_signatures_are_refused(world: World) -> None:
    sealed = world.sealer_of("node-9", NODE).seal(
        BODY, world.provenance(), prompt_tokens=1, positions=1
    )
    with pytest.raises(EnvelopeError, match="not enrolled"):
        world.opener.open(sealed)
    with pytest.raises(EnvelopeError, match="signature"):
        world.opener.open(_resign(world.seal(), OTHER_NODE))


def test_no_message_gives_anything_away(world: World) -> None:
    sealed = world.seal("bob")
    key = world.keyring.node_keys().subject("acme", "bob", sealed.parsed.period_id)
    world.keyring.destroy_subject("acme", "bob")
    attempts: list[Callable[[], object]] = [
        lambda: world.opener.open(sealed),
        lambda: world.opener.open(replace(sealed, commitment=bytes(32))),
        lambda: world.opener.open(_resign(sealed, OTHER_NODE)),
    ]
    for attempt in attempts:
        with pytest.raises((EnvelopeError, KeyDestroyedError)) as raised:
            attempt()
        assert "bob" not in str(raised.value)
    assert key.key.hex() not in repr(key)
    assert repr(key.key) not in repr(key)


def _resign(sealed: SealedTrace, key: SigningKey, **changes: Any) -> SealedTrace:
    changed = replace(sealed, **changes)
    message = envelope.signed_message(
        changed.header, changed.nonce, changed.ciphertext, changed.commitment
    )
    return replace(changed, signature=key.sign(message))
