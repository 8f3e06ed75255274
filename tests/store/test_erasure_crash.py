"""Erasure killed or raced anywhere: the same call finishes it, and nothing is left out."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.errors import KeyDestroyedError
from draftkeep.ingest.record import SealedTrace
from draftkeep.store import schema
from draftkeep.store.catalog import Catalog
from tests.deployment import PERIOD_S
from tests.store.conftest import World, ids
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


def die(tenant: str, subject: str) -> int:
    raise Killed


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
