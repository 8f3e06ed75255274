"""Erasure: plan, keys, bytes; whatever happens in between."""

import pytest
import sqlalchemy as sa

from draftkeep.errors import KeyDestroyedError
from draftkeep.ingest.record import SealedTrace
from draftkeep.store import schema
from draftkeep.store.jobs import end_job, is_contaminated, start_job
from draftkeep.store.sweeper import Sweeper
from tests.deployment import PERIOD_S, TTL_S
from tests.store.conftest import HookedCatalog, World, ids
from tests.store.erasures import add_drafter, erase, input_of, pointed, set_channel, statuses, store


def test_a_subject_is_erased_and_nobody_else(world: World) -> None:
    ann = [world.seal(subject="ann"), world.seal(subject="ann", domain="law")]
    world.clock.now_s += PERIOD_S
    ann.append(world.seal(subject="ann"))
    others = [
        world.seal(b"bob", subject="bob"),
        world.seal(b"anonymous"),
        world.seal(b"namesake", subject="ann", tenant="birch"),
    ]
    store(world, *ann, *others)
    result = erase(world)
    assert (result.aliases, result.traces, result.keys_destroyed) == (2, 3, 1)
    assert ids(world.stored()) == ids(others)
    assert {world.opener().open(item) for item in world.stored()} == {
        b"bob",
        b"anonymous",
        b"namesake",
    }
    for item in ann:
        with pytest.raises(KeyDestroyedError):
            world.opener().open(item)


def test_the_bytes_go_at_the_rewrite_and_do_not_come_back(world: World) -> None:
    ann, bob = world.seal(b"a" * 2000, subject="ann"), world.seal(subject="bob")
    late = world.seal(subject="ann")
    store(world, ann, bob)
    erase(world)
    report = world.rewrite_erased()
    assert (report.replaced, report.written, report.rows_removed) == (1, 1, 1)
    assert report.bytes_freed > 2000
    (name,) = world.files()
    content = (world.shards_dir / name).read_bytes()
    assert ann.ciphertext not in content
    assert bob.ciphertext in content
    assert world.rewrite_erased().replaced == 0
    world.append(ann, late)
    report_again = world.compactor().run_once()
    assert (report_again.stored, report_again.counted) == (0, {"erased": 2})
    assert ids(world.stored()) == ids([bob])


def test_a_shard_of_erased_rows_only_disappears(world: World) -> None:
    store(world, world.seal(subject="ann"), world.seal(subject="ann"))
    erase(world)
    report = world.rewrite_erased()
    assert (report.written, report.rows_removed) == (0, 2)
    assert world.files() == set()


def test_dead_letters_of_the_subject_go(world: World) -> None:
    sealed = world.seal(subject="ann")
    with world.catalog.begin() as connection:
        connection.execute(sa.delete(schema.node_tenants))
    store(world, sealed, world.seal(subject="bob"))
    erase(world)
    with world.catalog.read() as connection:
        assert len(connection.execute(sa.select(schema.dead_letters)).all()) == 1


@pytest.mark.parametrize("when", ["before the batch", "before its commit"])
def test_what_is_erased_is_no_dead_letter_whatever_else_is_wrong_with_it(
    world: World, when: str
) -> None:
    ann, bob = (world.seal(subject=subject) for subject in ("ann", "bob"))
    with world.catalog.begin() as connection:
        connection.execute(sa.delete(schema.node_tenants))
    # So that the next write is the batch's.
    world.compactor().run_once()
    world.append(bob, ann)
    catalog = HookedCatalog(world.catalog.engine)
    if when == "before the batch":
        erase(world)
    else:
        catalog.hook = lambda: erase(world)
    report = world.compactor(catalog=catalog).run_once()
    assert (report.dead, report.counted) == ({"tenant_not_allowed": 1}, {"erased": 1})
    with world.catalog.read() as connection:
        assert list(connection.scalars(sa.select(schema.dead_letters.c.alias))) == [
            bob.parsed.alias
        ]
        # So that the broker is asked to delete it as well.
        assert list(connection.scalars(sa.select(schema.offsets.c.erased_to))) == [2]


def test_what_learned_from_the_subject_leaves_service(world: World) -> None:
    ann, bob = world.seal(subject="ann"), world.seal(subject="bob")
    store(world, ann, bob)
    root = add_drafter(world, b"r0" * 16, learned=bob)
    clean = add_drafter(world, b"c0" * 16, parent=root)
    unsigned = add_drafter(world, b"u0" * 16, parent=clean, signed=False)
    tainted = add_drafter(world, b"t0" * 16, parent=unsigned, learned=ann)
    child = add_drafter(world, b"t1" * 16, parent=tainted)
    add_drafter(world, b"t2" * 16, parent=child, status="retired")
    lonely = add_drafter(world, b"t3" * 16, learned=ann)
    sibling = add_drafter(world, b"c1" * 16, parent=clean)
    for name, digest in (("stable", child), ("canary", lonely), ("other", sibling)):
        set_channel(world, name, digest)

    result = erase(world)
    assert (result.drafters_quarantined, result.channels_moved) == (4, 2)
    assert statuses(world) == {
        b"r0": "registered",
        b"c0": "registered",
        b"u0": "registered",
        b"c1": "registered",
        b"t0": "quarantined",
        b"t1": "quarantined",
        b"t2": "quarantined",
        b"t3": "quarantined",
    }
    assert pointed(world) == {"stable": clean, "canary": None, "other": sibling}


def test_unfinished_jobs_that_read_the_subject_are_contaminated(world: World) -> None:
    ann, bob = world.seal(subject="ann"), world.seal(subject="bob")
    store(world, ann, bob)
    tainted = add_drafter(world, b"t0" * 16, learned=ann)
    jobs: dict[str, tuple[list[SealedTrace], bytes | None]] = {
        "reads": ([ann, bob], None),
        "starts-from": ([bob], tainted),
        "failed": ([ann], None),
        "clean": ([bob], None),
        "done": ([ann], None),
    }
    for name, (inputs, parent) in jobs.items():
        start_job(
            world.catalog,
            name,
            scope="acme",
            parent=parent,
            inputs=[input_of(item) for item in inputs],
            at_s=world.clock(),
        )
    for name, failed in (("failed", True), ("done", False)):
        end_job(world.catalog, name, failed=failed, drafter=None, record={}, at_s=world.clock())
    assert erase(world).jobs_contaminated == 3
    marked = {name for name in jobs if is_contaminated(world.catalog, name)}
    assert marked == {"reads", "starts-from", "failed"}


def test_what_learned_from_the_subject_in_a_period_that_has_ended_leaves_service(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that more periods are asked about than fit one question.
    monkeypatch.setattr("draftkeep.store.influence.CHUNK", 1)
    ann, bob = world.seal(subject="ann"), world.seal(subject="bob")
    world.clock.now_s += PERIOD_S
    unused = world.seal(subject="ann")
    world.clock.now_s += PERIOD_S
    stopped = world.seal(subject="ann")
    store(world, ann, bob, unused, stopped)
    add_drafter(world, b"t0" * 16, learned=ann)
    add_drafter(world, b"c0" * 16, learned=bob)
    set_channel(world, "stable", b"t0" * 16)
    for name, read in (("tainted", stopped), ("clean", bob)):
        inputs = [input_of(read)]
        start_job(world.catalog, name, scope="acme", parent=None, inputs=inputs, at_s=0.0)
    outlive_periods(world, "ann")
    result = erase(world)
    # The living alias, and those of the two periods that something was learned from.
    assert (result.aliases, result.keys_destroyed) == (3, 1)
    assert statuses(world) == {b"t0": "quarantined", b"c0": "registered"}
    assert pointed(world) == {"stable": None}
    assert is_contaminated(world.catalog, "tainted")
    assert not is_contaminated(world.catalog, "clean")
    with world.catalog.read() as connection:
        erased = set(connection.scalars(sa.select(schema.tombstones.c.period_id)))
    assert {ann.parsed.period_id, stopped.parsed.period_id} < erased
    assert unused.parsed.period_id not in erased
    assert erase(world) == result


def outlive_periods(world: World, subject: str) -> None:
    """Until the periods of before have ended; the subject is seen again just before they do."""
    world.clock.now_s += TTL_S - PERIOD_S
    world.seal(subject=subject)
    world.clock.now_s += 4 * PERIOD_S
    world.keyring.destroy_expired(world.clock())


def test_whose_every_key_has_expired_is_a_stranger_to_what_learned_from_it(world: World) -> None:
    ann = world.seal(subject="ann")
    store(world, ann)
    add_drafter(world, b"d0" * 16, learned=ann)
    world.clock.now_s += TTL_S + PERIOD_S
    world.keyring.destroy_expired(world.clock())
    result = erase(world)
    assert (result.known, result.erasure_id) == (False, None)
    assert statuses(world) == {b"d0": "registered"}
    assert rows_of_erasures(world) == 0


def test_repeating_it_changes_nothing_and_says_the_same(world: World) -> None:
    store(world, world.seal(subject="ann"))
    first = erase(world)
    assert erase(world) == first
    assert first.known
    assert rows_of_erasures(world) == 1


def test_repeating_it_after_the_traces_expired_says_how_many_there_were(world: World) -> None:
    store(world, world.seal(subject="ann"), world.seal(subject="ann"))
    first = erase(world)
    world.clock.now_s += TTL_S + PERIOD_S
    swept = Sweeper(world.catalog, world.storage, clock=world.clock).run_once()
    assert (first.traces, swept.trace_ids) == (2, 2)
    assert erase(world) == first


def rows_of_erasures(world: World) -> int:
    with world.catalog.read() as connection:
        return len(connection.execute(sa.select(schema.erasures)).all())


def test_somebody_unknown_leaves_no_row_and_asks_nothing_of_a_broker(world: World) -> None:
    store(world, world.seal(subject="ann"))
    nothing = erase(world, subject="nobody")
    assert erase(world, subject="nobody") == nothing
    assert (nothing.known, nothing.erasure_id, nothing.aliases) == (False, None, 0)
    assert rows_of_erasures(world) == 0


def test_a_subject_that_comes_back_is_a_new_erasure(world: World) -> None:
    store(world, world.seal(subject="ann"))
    first = erase(world)
    again = world.seal(b"again", subject="ann")
    store(world, again)
    assert [world.opener().open(item) for item in world.stored()] == [b"again"]
    second = erase(world)
    assert second.erasure_id != first.erasure_id
    assert (second.aliases, second.traces, second.keys_destroyed) == (1, 1, 1)
    assert world.stored() == []


def test_no_name_is_written_into_the_catalog(world: World) -> None:
    store(world, world.seal(subject="annabella-the-first"))
    erase(world, subject="annabella-the-first")
    with world.catalog.read() as connection:
        for table in schema.metadata.sorted_tables:
            assert "annabella" not in repr(connection.execute(sa.select(table)).all())
    world.catalog.close()
    for path in world.root.glob("catalog*.db*"):
        assert b"annabella-the-first" not in path.read_bytes()
