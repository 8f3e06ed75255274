"""The registry: who may serve, and that an erasure always wins."""

import threading
from pathlib import Path

import pytest
import sqlalchemy as sa

from draftkeep.errors import ConflictError, DeniedError, ModelError
from draftkeep.store import schema
from draftkeep.store.catalog import Catalog
from draftkeep.store.jobs import start_job
from draftkeep.store.models.drafter_files import check_signature
from draftkeep.store.registry import EVERYONE, Registry
from tests.store.shop import GATE, Shop, learned


@pytest.fixture
def shop(tmp_path: Path, catalog: Catalog) -> Shop:
    return Shop(tmp_path, catalog, Registry(catalog, tmp_path / "drafters"))


def test_from_saved_to_serving(shop: Shop) -> None:
    digest = shop.registered(b"anna", admit=False)
    assert shop.registry.status(digest) == "registered"
    with pytest.raises(DeniedError, match="not signed"):
        shop.registry.set_channel("acme", "stable", digest, at_s=1)
    shop.registry.admit(digest, GATE.sign)
    check_signature((shop.registry.path(digest) / "signature").read_bytes(), digest, GATE.public)
    shop.registry.set_channel("acme", "stable", digest, at_s=2)
    assert shop.registry.channel("acme", "stable") == digest
    (entry,) = shop.registry.list()
    assert (entry.digest, entry.scope, entry.signed) == (digest, "acme", True)
    assert entry.measures == {"replay_acceptance": 0.7}


def test_a_channel_can_be_cleared(shop: Shop) -> None:
    digest = shop.registered()
    shop.registry.set_channel("acme", "stable", digest, at_s=1)
    shop.registry.set_channel("acme", "stable", None, at_s=2)
    assert shop.registry.channel("acme", "stable") is None


def test_registering_twice_changes_nothing_but_never_the_scope(shop: Shop) -> None:
    digest = shop.registered(b"anna")
    shop.registry.register(digest, scope="acme", inputs=[learned(b"anna")], at_s=9)
    (entry,) = shop.registry.list()
    assert entry.signed
    assert entry.created_s == 1
    with pytest.raises(ConflictError, match="scope"):
        shop.registry.register(digest, scope=EVERYONE, inputs=[], at_s=9)


def test_a_damaged_or_missing_directory_is_not_registered(shop: Shop) -> None:
    digest = shop.save()
    (shop.registry.path(digest) / "model.safetensors").write_bytes(b"altered")
    for one in (digest, b"?" * 32):
        with pytest.raises(ModelError):
            shop.registry.register(one, scope="acme", inputs=[], at_s=1)
    assert shop.registry.list() == ()


@pytest.mark.parametrize("kind", ["alias", "tenant"])
def test_what_learned_from_the_erased_is_not_registered(kind: str, shop: Shop) -> None:
    shop.bury(kind, b"anna" if kind == "alias" else b"acme")
    digest = shop.save()
    with pytest.raises(DeniedError, match="erased"):
        shop.registry.register(
            digest, scope="acme", inputs=[learned(b"ben"), learned(b"anna")], at_s=1
        )
    assert shop.registry.list() == ()
    with shop.catalog.read() as connection:
        assert connection.execute(sa.select(schema.lineage)).all() == []


def test_an_alias_of_another_period_is_another_alias(shop: Shop) -> None:
    shop.bury("alias", b"anna", period_id=b"q" * 16)
    assert shop.registry.status(shop.registered(b"anna")) == "registered"


def test_a_contaminated_job_cannot_register(shop: Shop) -> None:
    start_job(shop.catalog, "job-1", scope="acme", parent=None, inputs=[], at_s=1)
    with shop.catalog.begin() as connection:
        connection.execute(sa.update(schema.jobs).values(contaminated=True))
    with pytest.raises(DeniedError, match="job-1"):
        shop.registry.register(shop.save(), scope="acme", inputs=[], at_s=1, job="job-1")


@pytest.mark.parametrize("how", ["tombstone", "quarantined", "unknown"])
def test_a_child_of_a_tainted_parent_is_not_registered(how: str, shop: Shop) -> None:
    grandparent = shop.save() if how == "unknown" else shop.registered(b"anna")
    parent = grandparent if how == "unknown" else shop.registered(b"ben", parent=grandparent)
    if how == "tombstone":
        shop.bury("alias", b"anna")
    elif how == "quarantined":
        shop.mark(grandparent, "quarantined")
    with pytest.raises(DeniedError, match="parent"):
        shop.registry.register(shop.save(parent), scope="acme", inputs=[], at_s=3)


def test_erasure_between_registering_and_admission_wins(shop: Shop) -> None:
    digest = shop.registered(b"anna", admit=False)
    shop.bury("alias", b"anna")
    with pytest.raises(DeniedError):
        shop.registry.admit(digest, GATE.sign)
    assert not (shop.registry.path(digest) / "signature").exists()


def test_erasure_between_admission_and_promotion_wins(shop: Shop) -> None:
    parent = shop.registered(b"anna")
    digest = shop.registered(b"ben", parent=parent)
    shop.bury("alias", b"anna")
    with pytest.raises(DeniedError):
        shop.registry.set_channel("acme", "stable", digest, at_s=1)


@pytest.mark.parametrize("status", ["quarantined", "retired"])
def test_only_registered_drafters_serve(status: str, shop: Shop) -> None:
    digest = shop.registered(b"anna")
    shop.registry.set_channel("acme", "stable", digest, at_s=1)
    shop.mark(digest, status)
    assert shop.registry.channel("acme", "stable") is None
    with pytest.raises(DeniedError, match=status):
        shop.registry.set_channel("acme", "canary", digest, at_s=1)
    with pytest.raises(DeniedError, match=status):
        shop.registry.admit(digest, GATE.sign)


def test_a_drafter_serves_only_its_scope(shop: Shop) -> None:
    own, open_to_all = shop.registered(b"anna"), shop.registered(scope=EVERYONE)
    with pytest.raises(DeniedError, match="scope"):
        shop.registry.set_channel("birch", "stable", own, at_s=1)
    shop.registry.set_channel("birch", "stable", open_to_all, at_s=1)
    assert shop.registry.channel("birch", "stable") == open_to_all
    assert shop.registry.channel("acme", "stable") is None


def test_compare_and_set(shop: Shop) -> None:
    first, second = shop.registered(), shop.registered()
    shop.registry.set_channel("acme", "stable", first, expected=None, at_s=1)
    with pytest.raises(ConflictError, match="expected nothing"):
        shop.registry.set_channel("acme", "stable", second, expected=None, at_s=2)
    with pytest.raises(ConflictError):
        shop.registry.set_channel("acme", "stable", second, expected=second, at_s=2)
    assert shop.registry.channel("acme", "stable") == first
    shop.registry.set_channel("acme", "stable", second, expected=first, at_s=3)
    assert shop.registry.channel("acme", "stable") == second


def test_of_many_movers_one_wins(shop: Shop) -> None:
    drafters = [shop.registered() for _ in range(6)]
    won: list[bytes] = []
    start = threading.Barrier(len(drafters))

    def move(digest: bytes) -> None:
        start.wait()
        try:
            shop.registry.set_channel("acme", "stable", digest, expected=None, at_s=1)
        except ConflictError:
            return
        won.append(digest)

    threads = [threading.Thread(target=move, args=(digest,)) for digest in drafters]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert won == [shop.registry.channel("acme", "stable")]


def test_the_clean_ancestor_is_the_nearest_that_may_serve(shop: Shop) -> None:
    base = shop.registered(scope=EVERYONE)
    old = shop.registered(b"anna", parent=base)
    unsigned = shop.registered(b"ben", parent=old, admit=False)
    new = shop.registered(b"chen", parent=unsigned)
    assert shop.registry.clean_ancestor(new) == old
    shop.bury("alias", b"anna")
    assert shop.registry.clean_ancestor(new) == base
    shop.mark(base, "retired")
    assert shop.registry.clean_ancestor(new) is None
    assert shop.registry.clean_ancestor(b"?" * 32) is None
