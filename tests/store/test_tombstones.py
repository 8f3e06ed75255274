"""Tombstones of every kind take the rows they cover, and no others."""

from pathlib import Path

import pytest
import sqlalchemy as sa

from draftkeep.store import schema
from draftkeep.store.catalog import Catalog
from draftkeep.store.tombstones import erased_shards, load_tombstones
from tests.store.conftest import World, ids
from tests.store.erasure_row import insert_erasure


def _lay(catalog: Catalog, kind: str, *values: bytes) -> None:
    with catalog.begin() as connection:
        insert_erasure(connection, b"e", state="planned")
        for value in values:
            connection.execute(
                sa.insert(schema.tombstones).values(
                    kind=kind, value=value, period_id=b"", tenant="acme", erasure=b"e", at_s=1.0
                )
            )


@pytest.mark.parametrize("kind", ["tenant", "trace"])
def test_a_rewrite_finds_what_a_tombstone_covers(world: World, kind: str) -> None:
    acme = [world.seal(tenant="acme") for _ in range(3)]
    world.clock.now_s += 3600
    acme.append(world.seal(tenant="acme"))
    birch = [world.seal(tenant="birch") for _ in range(2)]
    world.append(*acme, *birch)
    world.compactor().run_once()
    covered, left = (acme, birch) if kind == "tenant" else (acme[:1], [*acme[1:], *birch])
    _lay(world.catalog, kind, b"acme" if kind == "tenant" else acme[0].parsed.trace_id)
    assert world.rewrite_erased().rows_removed == len(covered)
    assert ids(world.stored()) == ids(left)
    assert world.rewrite_erased().replaced == 0


def test_only_a_trace_of_its_own_makes_the_search_read_all_traces(tmp_path: Path) -> None:
    catalog = Catalog.open(tmp_path / "catalog.db")
    statement = erased_shards().compile(catalog.engine, compile_kwargs={"literal_binds": True})
    with catalog.read() as connection:
        plan = [row[3] for row in connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}")]
    catalog.close()
    scans = [at for at, step in enumerate(plan) if step.startswith("SCAN trace_ids")]
    assert len(scans) == 1
    # Within the search for such tombstones, so that it is not begun where there are none.
    assert plan[scans[0] - 1].startswith("SEARCH tombstones")


@pytest.mark.parametrize("others", [0, 1, 5, 600])
def test_what_a_batch_is_judged_by_is_found_among_few_and_many(world: World, others: int) -> None:
    headers = [world.seal(tenant="acme").parsed for _ in range(9)]
    strangers = [number.to_bytes(16, "big") for number in range(others)]
    _lay(world.catalog, "trace", headers[3].trace_id, *strangers)
    with world.catalog.read() as connection:
        found = load_tombstones(connection, headers)
    assert [header for header in headers if found.cover(header)] == [headers[3]]
