"""Every kind of damage is found, said in its own line, and mended where that loses nothing."""

import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import pyarrow.parquet as pq
import pytest
import sqlalchemy as sa

from draftkeep.ingest.record import SealedTrace
from draftkeep.policies.signing import SigningKey
from draftkeep.store import check_files, schema
from draftkeep.store.check import check_catalog, repair_catalog
from draftkeep.store.check_rules import RuleResult
from draftkeep.store.jobs import start_job
from draftkeep.store.periods import publish_period
from draftkeep.store.shard_rows import list_shards
from tests.deployment import PERIOD_S, START_S, TTL_S
from tests.store.conftest import World, ids
from tests.store.erasures import add_drafter, erase, input_of

SHARDS, TRACES, DRAFTERS = schema.shards, schema.trace_ids, schema.drafters


@dataclass
class Store:
    """A world with two shards: `kept` of one period, `late` of the next."""

    world: World
    kept: list[SealedTrace]
    late: SealedTrace

    def check(self, *, digests: bool = True) -> list[RuleResult]:
        return check_catalog(
            self.world.catalog,
            self.world.storage,
            logs=[self.world.log],
            now_s=self.world.clock(),
            digests=digests,
        )

    def broken(self, *, digests: bool = True) -> dict[str, int]:
        found = self.check(digests=digests)
        return {finding.rule: finding.broken for finding in found if finding.broken}

    def repair(self) -> None:
        repair_catalog(
            self.world.catalog, self.world.storage, self.check(), now_s=self.world.clock()
        )

    def change(self, statement: sa.Executable) -> None:
        with self.world.catalog.begin() as connection:
            connection.execute(statement)

    def shard(self, sealed: SealedTrace) -> str:
        """The name of the file that a trace is in."""
        query = sa.select(SHARDS.c.name).where(SHARDS.c.bucket_s == sealed.parsed.expiry_s)
        with self.world.catalog.read() as connection:
            return str(connection.scalar(query))


@pytest.fixture
def store(world: World) -> Store:
    kept = [world.seal(subject="ann"), world.seal(), world.seal()]
    world.append(*kept)
    world.compactor().run_once()
    world.clock.now_s += PERIOD_S
    late = world.seal(subject="bob")
    world.append(late)
    world.log.append([b"poison"])
    world.compactor().run_once()
    return Store(world, kept, late)


def test_a_store_that_was_only_used_breaks_no_rule(store: Store) -> None:
    assert store.broken() == {}
    erase(store.world, "ann")
    store.world.rewrite_erased()
    store.world.merge(10**6)
    assert store.broken() == {}
    rules = [finding.rule for finding in store.check()]
    assert len(set(rules)) == len(rules) > 20


def test_a_file_that_is_gone_is_reported_and_its_row_stays(store: Store) -> None:
    path = store.world.shards_dir / store.shard(store.late)
    data = path.read_bytes()
    path.unlink()
    store.repair()
    assert store.broken() == {"every listed file is there": 1}
    path.write_bytes(data)
    assert store.broken() == {}
    assert ids(store.world.stored()) == ids([*store.kept, store.late])


def _cut(store: Store) -> None:
    path = store.world.shards_dir / store.shard(store.late)
    path.write_bytes(path.read_bytes()[:-1])


def _flip(store: Store) -> None:
    path = store.world.shards_dir / store.shard(store.late)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _swap_files(store: Store) -> None:
    """The catalog lists, size and digest included, what is another shard's file."""
    other = store.shard(store.kept[0])
    path = store.world.shards_dir / store.shard(store.late)
    path.write_bytes((store.world.shards_dir / other).read_bytes())
    wanted = sa.select(SHARDS.c.bytes, SHARDS.c.sha256).where(SHARDS.c.name == other)
    with store.world.catalog.read() as connection:
        size, digest = connection.execute(wanted).one()
    store.change(
        sa.update(SHARDS).where(SHARDS.c.name == path.name).values(bytes=size, sha256=digest)
    )


def _count_wrongly(store: Store) -> None:
    store.change(sa.update(SHARDS).where(SHARDS.c.rows == 3).values(rows=4))


def _lose_a_trace_id(store: Store) -> None:
    wanted = TRACES.c.trace_id == store.kept[1].parsed.trace_id
    store.change(sa.delete(TRACES).where(wanted))


def _lose_all_trace_ids(store: Store) -> None:
    store.change(sa.delete(TRACES).where(TRACES.c.bucket_s == store.late.parsed.expiry_s))


def _move_a_shard(store: Store) -> None:
    late = SHARDS.c.name == store.shard(store.late)
    store.change(sa.update(SHARDS).where(late).values(bucket_s=SHARDS.c.bucket_s + 1))


def _unpublish(store: Store) -> None:
    store.change(sa.delete(schema.periods).where(schema.periods.c.start_s == START_S))


def _gap_ahead(store: Store) -> None:
    cluster, topic, partition = store.world.log.identity()
    key = {"cluster": cluster, "topic": topic, "partition": partition}
    store.change(sa.insert(schema.gaps).values(**key, first=7, next=9, seen_s=1.0))


def _offset_ahead(store: Store) -> None:
    store.change(sa.update(schema.offsets).values(next=99))


def _half_an_erasure(store: Store) -> None:
    store.world.seal(subject="passing")
    erase(store.world, "passing")
    store.change(sa.update(schema.erasures).values(state="planned"))


COUNTS = "a shard has as many trace ids as rows"
CONTENT = "a file holds the traces that the catalog has for it"
REPORTED: dict[str, tuple[Callable[[Store], None], set[str]]] = {
    "a file is cut": (_cut, {"every file has the size it was listed with"}),
    "a bit flips": (_flip, {"every file has the digest it was listed with"}),
    "files are swapped": (_swap_files, {CONTENT}),
    "a shard is miscounted": (_count_wrongly, {COUNTS}),
    "a trace id is lost": (_lose_a_trace_id, {COUNTS, CONTENT}),
    "a shard's trace ids are lost": (_lose_all_trace_ids, {COUNTS, CONTENT}),
    "a shard is moved": (_move_a_shard, {"a trace and its shard expire together"}),
    "a period is lost": (_unpublish, {"a stored trace's period is published"}),
    "a gap lies ahead": (_gap_ahead, {"no gap lies beyond its offset"}),
    "an offset lies ahead": (_offset_ahead, {"no stored offset lies beyond its log"}),
    "an erasure is not finished": (_half_an_erasure, {"every erasure is finished"}),
}


@pytest.mark.parametrize("case", REPORTED)
def test_what_cannot_be_mended_is_reported_and_left(store: Store, case: str) -> None:
    plant, rules = REPORTED[case]
    plant(store)
    before = store.world.files()
    assert store.broken().keys() == rules
    store.repair()
    assert store.broken().keys() == rules
    assert store.world.files() == before


def _orphan(store: Store) -> None:
    for name in ("1-54545454-lost.parquet", ".tmp-1-54545454-lost.parquet"):
        path = store.world.shards_dir / name
        path.write_bytes(b"half a shard")
        os.utime(path, (0, 0))


def _expire(store: Store) -> None:
    store.world.clock.now_s = START_S + TTL_S


def _expire_everything(store: Store) -> None:
    store.world.clock.now_s = START_S + TTL_S + 2 * PERIOD_S


def _shorten(store: Store) -> None:
    world = store.world
    record = world.keyring.ensure_period("acme", START_S)
    shorter = replace(record, destroy_at_s=START_S + 4 * PERIOD_S)
    issuer = SigningKey.load(world.root / "keys" / "issuer.key")
    publish_period(world.catalog, replace(shorter, signature=issuer.sign(shorter.signed_bytes())))
    world.clock.now_s = START_S + 4 * PERIOD_S


def _erase(store: Store) -> None:
    erase(store.world, "ann")


def _learn_and_forget_the_quarantine(store: Store) -> None:
    """A catalog that was put together by hand: the tombstone is there, what follows from it not."""
    add_drafter(store.world, b"taught", learned=store.kept[0])
    add_drafter(store.world, b"child", parent=b"taught")
    inputs = [input_of(store.kept[0])]
    start_job(store.world.catalog, "j1", scope="everyone", parent=None, inputs=inputs, at_s=1.0)
    store.change(
        sa.insert(schema.channels).values(
            scope="everyone", name="stable", digest=b"child", changed_s=1.0
        )
    )
    erase(store.world, "ann")
    store.world.rewrite_erased()
    assert store.broken() == {}
    store.change(sa.update(schema.jobs).values(contaminated=False))
    store.change(sa.update(schema.channels).values(digest=b"child"))
    taught = DRAFTERS.c.digest == b"taught"
    store.change(sa.update(DRAFTERS).where(taught).values(status="registered"))


def _a_child_that_serves(store: Store) -> None:
    add_drafter(store.world, b"parent")
    add_drafter(store.world, b"child", parent=b"parent")
    parent = DRAFTERS.c.digest == b"parent"
    store.change(sa.update(DRAFTERS).where(parent).values(status="quarantined"))


MENDED: dict[str, tuple[Callable[[Store], None], dict[str, int]]] = {
    "files that nothing lists": (_orphan, {"every file past its grace is listed": 2}),
    "a deadline": (
        _expire,
        {"no shard is past its deadline": 1, "no trace id is past its deadline": 1},
    ),
    "all deadlines": (
        _expire_everything,
        {
            "no shard is past its deadline": 2,
            "no trace id is past its deadline": 2,
            "no dead letter is past its deadline": 1,
        },
    ),
    "a shortened deadline": (_shorten, {"no shard holds rows past a shortened deadline": 1}),
    "erased rows": (_erase, {"no shard holds erased rows": 1}),
    "what erasure should have stopped": (
        _learn_and_forget_the_quarantine,
        {
            "what learned from erased traces is quarantined": 1,
            "no channel points at a quarantined drafter": 1,
            "no unfinished job reads erased traces": 1,
        },
    ),
    "a descendant": (
        _a_child_that_serves,
        {"what descends from a quarantined drafter is quarantined": 1},
    ),
}


@pytest.mark.parametrize("case", MENDED)
def test_what_can_be_mended_is(store: Store, case: str) -> None:
    plant, rules = MENDED[case]
    plant(store)
    assert store.broken() == rules
    living = ids(store.world.stored())
    store.repair()
    assert store.broken() == {}
    assert ids(store.world.stored()) == living


def test_a_trace_without_its_shard_is_found(store: Store) -> None:
    with store.world.catalog.begin() as connection:
        connection.exec_driver_sql("UPDATE trace_ids SET shard = 99 WHERE shard = 2")
    assert store.broken() == {
        "a stored trace's shard is listed": 1,
        COUNTS: 1,
        CONTENT: 1,
    }


def test_a_file_within_its_grace_and_other_files_are_nobodys_business(store: Store) -> None:
    fresh = store.world.shards_dir / "1-54545454-new.parquet"
    fresh.write_bytes(b"half a shard")
    os.utime(fresh, (0, store.world.clock() - 10))
    (store.world.shards_dir / "README.txt").write_text("read me")
    assert store.broken() == {}


def test_sizes_alone_do_not_read_the_files(store: Store) -> None:
    _flip(store)
    assert store.broken(digests=False) == {}
    _cut(store)
    assert store.broken(digests=False) == {"every file has the size it was listed with": 1}


def test_a_lost_file_does_not_stop_the_other_repairs(store: Store) -> None:
    for subject in ("ann", "bob"):
        erase(store.world, subject)
    _orphan(store)
    (store.world.shards_dir / store.shard(store.kept[0])).unlink()
    assert store.broken()["no shard holds erased rows"] == 2
    store.repair()
    assert store.broken() == {"every listed file is there": 1, "no shard holds erased rows": 1}


def test_a_lost_file_does_not_stop_a_merge(store: Store) -> None:
    world = store.world
    for _ in range(2):
        world.append(world.seal())
        world.compactor().run_once()
    (world.shards_dir / store.shard(store.late)).unlink()
    assert world.merge(10**6).replaced == 2
    assert store.broken() == {"every listed file is there": 1}


def test_a_shard_replaced_while_it_is_checked_breaks_no_rule(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.world.append(store.world.seal())
    store.world.compactor().run_once()
    merged: list[int] = []

    def listing(*arguments: object) -> object:
        found = list_shards(*arguments)  # type: ignore[arg-type]
        if not merged:
            merged.append(store.world.merge(10**6).replaced)
        return found

    monkeypatch.setattr(check_files, "list_shards", listing)
    assert store.broken() == {}
    assert merged == [2]


def test_the_examples_are_few_and_named(store: Store) -> None:
    for number in range(5):
        path = store.world.shards_dir / f"1-54545454-{number}.parquet"
        path.write_bytes(b"")
        os.utime(path, (0, 0))
    (found,) = [finding for finding in store.check() if finding.broken]
    assert found.broken == 5
    assert found.examples == tuple(f"1-54545454-{number}.parquet" for number in range(3))


def test_a_shard_of_a_format_to_come_is_said_to_be_strange(store: Store) -> None:
    path = store.world.shards_dir / store.shard(store.late)
    table = pq.read_table(path)
    pq.write_table(table.replace_schema_metadata({"draftkeep.shard": "9"}), path)
    digest = hashlib.sha256(path.read_bytes()).digest()
    store.change(
        sa.update(SHARDS)
        .where(SHARDS.c.name == path.name)
        .values(bytes=path.stat().st_size, sha256=digest)
    )
    assert store.broken() == {CONTENT: 1}
