"""The catalog under several processes, and the small facts it keeps."""

import sqlite3
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from draftkeep.errors import ConflictError, DeniedError, StoreError
from draftkeep.policies.retention import PeriodRecord
from draftkeep.policies.signing import SigningKey
from draftkeep.store import schema
from draftkeep.store.catalog import Catalog
from draftkeep.store.drops import add_drops
from draftkeep.store.jobs import JobInput, end_job, is_contaminated, start_job
from draftkeep.store.nodes import NodePublicKeys, enrol_node, load_nodes, node_public, revoke_node
from draftkeep.store.periods import load_periods, publish_period, publish_periods
from tests.store.erasure_row import insert_erasure


def test_sqlite_runs_with_the_settings_durability_needs(tmp_path: Path) -> None:
    catalog = Catalog.open(tmp_path / "state" / "catalog.db")
    with catalog.read() as connection:
        found = {
            name: connection.exec_driver_sql(f"PRAGMA {name}").scalar()
            for name in ("journal_mode", "synchronous", "foreign_keys")
        }
    catalog.close()
    assert found == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}


def test_postgresql_runs_with_the_settings_durability_needs(postgres_catalog_url: str) -> None:
    catalog = Catalog.connect(postgres_catalog_url)
    with catalog.read() as connection:
        found = {
            name: connection.exec_driver_sql(f"SHOW {name}").scalar()
            for name in ("transaction_isolation", "transaction_read_only", "synchronous_commit")
        }
    with catalog.begin() as connection:
        isolation = connection.exec_driver_sql("SHOW transaction_isolation").scalar()
    catalog.close()
    assert found == {
        "transaction_isolation": "repeatable read",
        "transaction_read_only": "on",
        "synchronous_commit": "on",
    }
    assert isolation == "read committed"


def test_foreign_keys_hold(catalog: Catalog) -> None:
    with pytest.raises(sa.exc.IntegrityError), catalog.begin() as connection:
        connection.execute(sa.insert(schema.node_tenants).values(node="nobody", tenant="acme"))


OPEN_AND_COUNT = """
import sys
from draftkeep.store.catalog import Catalog
from draftkeep.store.drops import add_drops
catalog = Catalog.connect(sys.argv[1])
for _ in range(25):
    with catalog.begin() as connection:
        add_drops(connection, "test", {"busy": 1}, 0.0)
catalog.close()
"""


def test_processes_that_open_a_fresh_catalog_at_once_lose_no_write(bare_url: str) -> None:
    command = [sys.executable, "-c", OPEN_AND_COUNT, bare_url]
    processes = [subprocess.Popen(command) for _ in range(4)]
    assert [process.wait() for process in processes] == [0, 0, 0, 0]
    catalog = Catalog.connect(bare_url)
    with catalog.read() as connection:
        assert connection.scalar(sa.select(schema.drops.c.count)) == 100
        assert connection.execute(sa.select(schema.schema_version)).all() == [
            (schema.SCHEMA_VERSION,)
        ]
    catalog.close()


def test_a_write_that_follows_a_read_is_not_lost(catalog: Catalog) -> None:
    with catalog.begin() as connection:
        add_drops(connection, "test", {"x": 1}, 0.0)
    count = schema.drops.c.count

    def increment() -> None:
        for _ in range(20):
            with catalog.begin() as connection:
                value = connection.scalar(sa.select(count))
                connection.execute(sa.update(schema.drops).values(count=(value or 0) + 1))

    threads = [threading.Thread(target=increment) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with catalog.read() as connection:
        assert connection.scalar(sa.select(count)) == 81


def test_a_reader_sees_one_snapshot_and_does_not_block_a_writer(catalog: Catalog) -> None:
    query = sa.select(sa.func.count()).select_from(schema.drops)
    with catalog.read() as reader:
        assert reader.scalar(query) == 0
        with catalog.begin() as writer:
            add_drops(writer, "test", {"x": 1}, 0.0)
        assert reader.scalar(query) == 0
    with catalog.read() as reader:
        assert reader.scalar(query) == 1


def test_a_transaction_that_raises_leaves_nothing(catalog: Catalog) -> None:
    def write_and_fail() -> None:
        with catalog.begin() as connection:
            add_drops(connection, "test", {"x": 1}, 0.0)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        write_and_fail()
    with catalog.read() as connection:
        assert connection.execute(sa.select(schema.drops)).all() == []


def test_a_newer_schema_is_refused(catalog: Catalog, catalog_url: str) -> None:
    newer = schema.SCHEMA_VERSION + 1
    with catalog.begin() as connection:
        connection.execute(sa.update(schema.schema_version).values(version=newer))
    with pytest.raises(StoreError, match=f"schema version {newer}, expected {newer - 1}"):
        Catalog.connect(catalog_url)


def test_a_file_that_is_no_catalog_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(StoreError, match="cannot be opened"):
        Catalog.open(path)
    assert path.read_bytes() == b"no database at all" * 100


def test_the_file_is_a_plain_sqlite_database(tmp_path: Path) -> None:
    Catalog.open(tmp_path / "state" / "catalog.db").close()
    with sqlite3.connect(tmp_path / "state" / "catalog.db") as connection:
        names = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    connection.close()
    assert set(schema.metadata.tables) <= names


def test_a_reader_keeps_the_keys_it_found_and_asks_again_for_others(catalog: Catalog) -> None:
    publics = NodePublicKeys(catalog)
    assert publics("n1") is None
    enrol_node(catalog, "n1", b"p" * 32, ["acme"], 10.0)
    assert publics("n1") == b"p" * 32
    revoke_node(catalog, "n1", 20.0)
    catalog.close()
    assert publics("n1") == b"p" * 32
    assert publics("n2") is None


def test_enrolling_again_replaces_the_tenants_and_keeps_the_date(catalog: Catalog) -> None:
    enrol_node(catalog, "n1", b"p" * 32, ["acme", "birch"], 10.0)
    enrol_node(catalog, "n1", b"p" * 32, ["birch", "cedar"], 20.0)
    with catalog.read() as connection:
        node = load_nodes(connection)["n1"]
    assert node.tenants == {"birch", "cedar"}
    assert (node.enrolled_s, node.revoked_s) == (10.0, None)


def test_a_node_name_belongs_to_one_key_for_ever(catalog: Catalog) -> None:
    enrol_node(catalog, "n1", b"p" * 32, ["acme"], 10.0)
    with pytest.raises(DeniedError, match="another key"):
        enrol_node(catalog, "n1", b"q" * 32, ["acme"], 20.0)
    revoke_node(catalog, "n1", 30.0)
    revoke_node(catalog, "n1", 40.0)
    with pytest.raises(DeniedError, match="revoked"):
        enrol_node(catalog, "n1", b"p" * 32, ["acme"], 50.0)
    assert node_public(catalog, "n1") == b"p" * 32
    with catalog.read() as connection:
        assert load_nodes(connection)["n1"].revoked_s == 30.0
    with pytest.raises(DeniedError, match="not enrolled"):
        revoke_node(catalog, "n2", 30.0)
    assert node_public(catalog, "n2") is None


def _record(key: SigningKey, **changes: object) -> PeriodRecord:
    record = PeriodRecord(
        tenant="acme",
        period_id=b"i" * 16,
        start_s=3600,
        destroy_at_s=90_000,
        public_key=b"k" * 1216,
    )
    record = replace(record, **changes)  # type: ignore[arg-type]
    return replace(record, signature=key.sign(record.signed_bytes()))


def test_a_period_that_is_published_waits_for_no_writer(catalog: Catalog, tmp_path: Path) -> None:
    key = SigningKey.load_or_create(tmp_path / "issuer.key")
    publish_period(catalog, _record(key))
    with catalog.begin():
        publish_period(catalog, _record(key))
        publish_periods(catalog, [_record(key)])


def test_a_published_deadline_moves_only_to_an_earlier_time(
    catalog: Catalog, tmp_path: Path
) -> None:
    key = SigningKey.load_or_create(tmp_path / "issuer.key")
    publish_period(catalog, _record(key))
    publish_period(catalog, _record(key))
    publish_period(catalog, _record(key, destroy_at_s=50_000))
    with pytest.raises(StoreError, match="only to an earlier time"):
        publish_period(catalog, _record(key))
    with pytest.raises(StoreError, match="other contents"):
        publish_period(catalog, _record(key, destroy_at_s=50_000, tenant="birch"))
    with catalog.read() as connection:
        found = load_periods(connection, [b"i" * 16, b"j" * 16])
    assert found.keys() == {b"i" * 16}
    assert found[b"i" * 16].record == _record(key, destroy_at_s=50_000)
    assert found[b"i" * 16].issued_expiry_s == 90_000
    assert found[b"i" * 16].record.verify(key.public)


def test_drops_add_up_by_hour(catalog: Catalog) -> None:
    with catalog.begin() as connection:
        add_drops(connection, "n1", {"queue_full": 3, "no_key": 0}, 3599.0)
        add_drops(connection, "n1", {"queue_full": 4}, 3600.0)
        add_drops(connection, "n1", {"queue_full": 5}, 7199.9)
    with catalog.read() as connection:
        rows = connection.execute(sa.select(schema.drops)).all()
    assert sorted(rows) == [("n1", "queue_full", 0, 3), ("n1", "queue_full", 3600, 9)]


def test_a_job_cannot_start_on_erased_inputs(catalog: Catalog) -> None:
    clean = JobInput(tenant="acme", alias=b"a" * 16, period_id=b"p" * 16, positions=5)
    erased = replace(clean, alias=b"e" * 16)
    with catalog.begin() as connection:
        insert_erasure(connection, b"x" * 16, aliases=1, keys_destroyed=1)
        connection.execute(
            sa.insert(schema.tombstones).values(
                kind="alias",
                value=b"e" * 16,
                period_id=b"p" * 16,
                tenant="acme",
                erasure=b"x" * 16,
                at_s=1.0,
            )
        )
    start = {"scope": "acme", "parent": None, "at_s": 2.0}
    with pytest.raises(ConflictError, match="erased while it was selected"):
        start_job(catalog, "j1", inputs=[clean, erased], **start)  # type: ignore[arg-type]
    with catalog.read() as connection:
        assert connection.execute(sa.select(schema.jobs)).all() == []
    start_job(catalog, "j1", inputs=[clean], **start)  # type: ignore[arg-type]
    start_job(catalog, "j1", inputs=[clean], **start)  # type: ignore[arg-type]
    assert not is_contaminated(catalog, "j1")
    end_job(catalog, "j1", failed=False, drafter=b"d" * 32, record={"steps": 7}, at_s=3.0)
    with catalog.read() as connection:
        row = connection.execute(sa.select(schema.jobs)).one()
    assert (row.state, row.drafter, row.record, row.ended_s) == ("done", b"d" * 32, {"steps": 7}, 3)
