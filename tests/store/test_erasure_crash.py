"""Erasure killed or raced anywhere: the same call finishes it, and nothing is left out."""

import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.errors import KeyDestroyedError
from draftkeep.ingest.record import SealedTrace
from draftkeep.policies.keyring import Keyring
from draftkeep.store import schema
from draftkeep.store.catalog import Catalog
from draftkeep.store.erasure import ErasureResult, erase_subject
from tests.deployment import PERIOD_S, RETENTION
from tests.store.conftest import HookedCatalog, World, ids
from tests.store.erasures import add_drafter, erase, pointed, set_channel, statuses, store


class Killed(BaseException):
    """Stands for SIGKILL: nothing catches it."""


class KilledCatalog(Catalog):
    """Dies after its n-th write transaction has committed, or just before it begins."""

    left: int = 0
    after: bool = True

    @contextmanager
    def begin(self, *, shared: bool = False) -> Iterator[Connection]:
        self.left -= 1
        if self.left == 0 and not self.after:
            raise Killed
        with super().begin(shared=shared) as connection:
            yield connection
        if self.left == 0:
            raise Killed


def die(*_: object, **__: object) -> int:
    raise Killed


def once_before(world: World, name: str, hook: Callable[[], object]) -> None:
    """Run `hook` before the next call of a method of the keyring."""
    method = getattr(world.keyring, name)

    def hooked(*arguments: Any, **options: Any) -> Any:
        setattr(world.keyring, name, method)
        hook()
        return method(*arguments, **options)

    setattr(world.keyring, name, hooked)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("transaction", [1, 2])
def test_killed_anywhere_it_is_finished_by_the_same_call(
    world: World, transaction: int, after: bool
) -> None:
    ann, bob = world.seal(subject="ann"), world.seal(subject="bob")
    store(world, ann, bob)
    tainted = add_drafter(world, b"t0" * 16, learned=ann)
    set_channel(world, "stable", tainted)
    catalog = KilledCatalog(world.catalog.engine)
    catalog.left, catalog.after = transaction, after
    with pytest.raises(Killed):
        erase(world, catalog=catalog)
    if transaction == 1 and not after:
        assert ids(world.stored()) == ids([ann, bob])
    else:
        assert ids(world.stored()) == ids([bob])
        assert statuses(world) == {b"t0": "quarantined"}
    result = erase(world)
    assert (result.aliases, result.traces, result.drafters_quarantined) == (1, 1, 1)
    assert (result.channels_moved, pointed(world)) == (1, {"stable": None})
    with world.catalog.read() as connection:
        rows = connection.execute(sa.select(schema.erasures)).all()
    assert [row.state for row in rows] == ["done"]
    with pytest.raises(KeyDestroyedError):
        world.opener().open(ann)
    assert world.opener().open(bob) == b"body"


def test_killed_between_plan_and_keys_nothing_reads_the_subject(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    ann = world.seal(subject="ann")
    store(world, ann)
    with monkeypatch.context() as patch:
        patch.setattr(world.keyring, "destroy_subject", die)
        with pytest.raises(Killed):
            erase(world)
    assert world.stored() == []
    assert world.opener().open(ann) == b"body"
    result = erase(world)
    assert (result.aliases, result.keys_destroyed) == (1, 1)
    with pytest.raises(KeyDestroyedError):
        world.opener().open(ann)


def test_a_period_opened_while_the_plan_is_written_is_erased_too(world: World) -> None:
    store(world, world.seal(subject="ann"))
    world.clock.now_s += PERIOD_S
    late: list[SealedTrace] = []

    class Racing(Catalog):
        @contextmanager
        def begin(self, *, shared: bool = False) -> Iterator[Connection]:
            with super().begin(shared=shared) as connection:
                yield connection
            if not late:
                late.append(
                    world.sealer.seal(
                        b"late", world.provenance(subject="ann"), prompt_tokens=1, positions=1
                    )
                )

    result = erase(world, catalog=Racing(world.catalog.engine))
    assert (result.aliases, result.traces, result.keys_destroyed) == (2, 1, 1)
    assert late
    with world.catalog.read() as connection:
        erased = set(connection.scalars(sa.select(schema.tombstones.c.value)))
    assert late[0].parsed.alias in erased


@pytest.mark.parametrize("seen_before", [False, True])
def test_a_period_opened_just_before_the_keys_go_is_erased_too(
    world: World, seen_before: bool
) -> None:
    if seen_before:
        store(world, world.seal(subject="ann"))
    world.clock.now_s += PERIOD_S
    late: list[SealedTrace] = []
    once_before(world, "destroy_subject", lambda: late.append(world.seal(subject="ann")))
    result = erase(world)
    assert (result.known, result.keys_destroyed) == (True, 1)
    assert result.aliases == 1 + seen_before
    world.append(*late)
    report = world.compactor().run_once()
    assert (report.stored, report.counted) == (0, {"erased": 1})
    with pytest.raises(KeyDestroyedError):
        world.opener().open(late[0])
    assert erase(world) == result


def test_killed_before_a_late_period_was_planned_its_key_lives_and_the_next_call_plans_it(
    world: World,
) -> None:
    store(world, world.seal(subject="ann"))
    world.clock.now_s += PERIOD_S
    late: list[SealedTrace] = []
    once_before(world, "destroy_subject", lambda: late.append(world.seal(subject="ann")))
    catalog = KilledCatalog(world.catalog.engine)
    catalog.left, catalog.after = 2, False
    with pytest.raises(Killed):
        erase(world, catalog=catalog)
    assert world.opener().open(late[0]) == b"body"
    assert (erase(world).aliases, world.keyring.aliases_of("acme", "ann")) == (2, [])


def test_killed_after_the_keys_of_a_subject_without_a_living_period_it_is_known(
    world: World,
) -> None:
    ann = world.seal(subject="ann")
    store(world, ann)
    forget_aliases(world)
    catalog = KilledCatalog(world.catalog.engine)
    catalog.left, catalog.after = 2, False
    with pytest.raises(Killed):
        erase(world, catalog=catalog)
    assert world.keyring.destroy_subject("acme", "ann") == 0
    result = erase(world)
    assert (result.known, result.aliases) == (True, 0)
    assert erase(world) == result


def forget_aliases(world: World) -> None:
    """Half of what a period's end does, where it was killed between two commits."""
    connection = sqlite3.connect(world.root / "keys" / "keyring.db", isolation_level=None)
    connection.execute("DELETE FROM aliases")
    connection.close()


def test_an_erasure_that_another_overtakes_says_what_that_one_did(world: World) -> None:
    store(world, world.seal(subject="ann"))
    catalog = HookedCatalog(world.catalog.engine)
    first: list[ErasureResult] = []
    catalog.hook = lambda: first.append(erase(world))
    second = erase(world, catalog=catalog)
    assert second.known
    assert first == [second] == [erase(world)]


def test_of_several_erasures_at_once_each_knows_the_subject(world: World) -> None:
    def one(subject: str) -> ErasureResult:
        keyring = Keyring.open(world.root / "keys", retention=RETENTION, clock=world.clock)
        with closing(keyring), closing(Catalog.connect(world.catalog_url)) as catalog:
            return erase_subject(
                catalog, keyring, tenant="acme", subject=subject, now_s=world.clock()
            )

    for number in range(5):
        subject = f"subject-{number}"
        store(world, world.seal(subject=subject))
        with ThreadPoolExecutor(3) as pool:
            results = list(pool.map(one, [subject] * 3))
        assert [result.known for result in results] == [True] * 3
        assert len({result.erasure_id for result in results}) == 1
        assert max(result.keys_destroyed for result in results) == 1
