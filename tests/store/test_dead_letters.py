"""Refused records are kept for a while, and never more of them than fit."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from draftkeep.ingest.log import PartitionId
from draftkeep.store import dead_letters, schema
from draftkeep.store.admission import Refusal, Refused
from draftkeep.store.audit import AuditSession
from draftkeep.store.catalog import Catalog
from draftkeep.store.dead_letters import DEAD_LETTER_TTL_S, ROW_BYTES, add_dead_letters
from draftkeep.store.sweeper import Sweeper
from tests.deployment import START_S
from tests.store.conftest import World, resign

LOG = PartitionId("c", "t", 0)
SIZE = 1000


@pytest.fixture
def room_for_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "DEAD_LETTER_BYTES", 3 * (SIZE + ROW_BYTES))


def junk(world: World, count: int) -> list[bytes]:
    return sorted(world.rng.randbytes(SIZE) for _ in range(count))


def compact(world: World, *records: bytes) -> None:
    world.log.append(list(records))
    world.compactor().run_once()


def letters(catalog: Catalog) -> list[tuple[bytes, int, int]]:
    """Record, kept bytes and count of each, in the order they came in."""
    row = schema.dead_letters.c
    with catalog.read() as connection:
        query = sa.select(row.record, row.kept_bytes, row.count).order_by(row.id)
        return [tuple(found) for found in connection.execute(query)]


@pytest.mark.usefixtures("room_for_three")
def test_beyond_the_bound_records_are_counted_and_leave_no_row(world: World) -> None:
    records = junk(world, 5)
    compact(world, *records, *records[:1] * 9)
    kept = [(record, SIZE + ROW_BYTES) for record in records[:3]]
    assert [row[:2] for row in letters(world.catalog)] == kept
    compact(world, records[4], records[0], b"small")
    assert [row[:2] for row in letters(world.catalog)] == kept
    assert [row[2] for row in letters(world.catalog)] == [11, 1, 1]
    with AuditSession(world.catalog, world.storage, now_s=world.clock()) as session:
        losses = [(kind, reason, count) for kind, _, reason, count in session.report("losses").rows]
    assert losses == [("dead letter", "unreadable", 13), ("drop", "unreadable", 4)]


def test_a_count_that_is_full_stops_no_line(world: World) -> None:
    most = 2**31 - 1
    compact(world, b"again and again")
    with world.catalog.begin() as connection:
        connection.execute(sa.update(schema.dead_letters).values(count=most))
    compact(world, b"again and again", b"another")
    assert [row[2] for row in letters(world.catalog)] == [most, 1]


@pytest.mark.usefixtures("room_for_three")
def test_what_expires_makes_room(world: World) -> None:
    compact(world, *junk(world, 4))
    world.clock.now_s += DEAD_LETTER_TTL_S + 1
    assert Sweeper(world.catalog, world.storage, clock=world.clock).run_once().dead_letters == 3
    records = junk(world, 1)
    compact(world, *records)
    assert [row[0] for row in letters(world.catalog)] == records


@pytest.mark.usefixtures("room_for_three")
def test_two_writers_do_not_fill_one_room(world: World) -> None:
    def add(records: Sequence[bytes], connection: sa.Connection) -> None:
        refused = [
            Refused(
                offset=offset,
                data=data,
                header=None,
                reason=Refusal.UNREADABLE,
                detail="",
            )
            for offset, data in enumerate(records)
        ]
        add_dead_letters(connection, refused, log=LOG, now_s=world.clock())

    def add_alone(records: Sequence[bytes]) -> None:
        with world.catalog.begin(shared=True) as connection:
            add(records, connection)

    with ThreadPoolExecutor(1) as pool:
        with world.catalog.begin(shared=True) as connection:
            add(junk(world, 2), connection)
            other = pool.submit(add_alone, junk(world, 2))
            with pytest.raises(TimeoutError):
                other.result(timeout=0.5)
        other.result()
    assert [bool(row[0]) for row in letters(world.catalog)] == [True, True, True]


def test_none_is_kept_longer_than_a_trace_would_be(world: World) -> None:
    row = schema.dead_letters.c

    def deadlines() -> list[int]:
        with world.catalog.read() as connection:
            return list(connection.scalars(sa.select(row.expiry_s).order_by(row.id)))

    now_s = int(world.clock())
    compact(world, b"a version of tomorrow, and no period is known")
    assert deadlines() == [now_s + DEAD_LETTER_TTL_S]
    later, sooner = (
        resign(world, world.seal(), expiry_s=START_S + expiry_s) for expiry_s in (9_999_999, 99)
    )
    with world.catalog.begin() as connection:
        shorter = schema.periods.c.start_s + 7200
        connection.execute(sa.update(schema.periods).values(destroy_at_s=shorter))
    compact(world, b"another version of tomorrow")
    world.append(later)
    world.append(sooner)
    world.compactor().run_once()
    assert sorted(deadlines()[1:]) == [START_S + 99, now_s + 7200, now_s + 7200]
