"""What sealed traces cost to read, to open, to erase and to expire, by how many there are."""

from collections.abc import Sequence
from functools import partial
from itertools import islice

from bench.scale.points import middle, timed
from bench.scale.probes import Probes
from bench.scale.run import MS, PER_1000, Run
from bench.scale.traffic import PERIOD_S, TARGET, TTL_S
from draftkeep.policies.retention import period_start
from draftkeep.store.erasure import erase_subject
from draftkeep.store.reader import iter_sealed
from draftkeep.store.schema import shards
from draftkeep.store.shard_rows import list_shards
from draftkeep.store.tombstones import erased_shards
from tests.deployment import Deployment

_SELECTED, _OPENED, _ERASED = 5000, 1000, 5


def measure(
    run: Run, phase: str, world: Deployment, at: int, users: Sequence[tuple[str, str]]
) -> None:
    """Everything once. `users` are (tenant, name) of subjects with fresh traces."""
    _open(run, phase, world, at, users[0][0])
    _erase(run, phase, world, at, users[:_ERASED])
    with world.catalog.read() as connection:
        listed = list_shards(connection)
    stored = sum(row.rows for row in listed)
    if stored:
        size_bytes = sum(row.size_bytes for row in listed)
        run.add_value(phase, "shard_bytes_a_trace", at, size_bytes / stored, "B")
        run.add_value(phase, "traces_a_shard", at, stored / len(listed), "traces")
    still_open_s = period_start(world.clock.now_s, PERIOD_S) + TTL_S
    Probes(run, phase, world.catalog, world.storage).expire_oldest(at, still_open_s)
    run.add_peak(phase, at)


def _open(run: Run, phase: str, world: Deployment, at: int, tenant: str) -> None:
    opener = world.opener()
    chosen = iter_sealed(
        world.catalog,
        world.storage,
        tenants={tenant},
        target=TARGET,
        not_after_s=world.clock.now_s,
    )
    found, took = timed(lambda: list(islice(chosen, _SELECTED)))
    run.add(phase, "select", at, took.over(max(1, len(found)) / 1000), PER_1000)
    some = found[:_OPENED]
    _, took = timed(lambda: [opener.open(item) for item in some])
    run.add(phase, "open", at, took.over(max(1, len(some)) / 1000), PER_1000)


def _erase(
    run: Run, phase: str, world: Deployment, at: int, users: Sequence[tuple[str, str]]
) -> None:
    taken = []
    for tenant, name in users:
        erase = partial(
            erase_subject,
            world.catalog,
            world.keyring,
            tenant=tenant,
            subject=name,
            now_s=world.clock.now_s,
        )
        taken.append(timed(erase)[1])
    run.add(phase, "erase", at, middle(taken), MS)
    with world.catalog.read() as connection:
        touched = list_shards(connection, shards.c.id.in_(erased_shards()))
    _, took = timed(world.rewrite_erased)
    rows = sum(row.rows for row in touched)
    run.add(phase, "rewrite", at, took.over(max(1, rows) / 1000), PER_1000)
    run.add_value(phase, "rows_rewritten_an_erasure", at, rows / len(users), "traces")
