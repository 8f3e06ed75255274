"""Schemas of every age become this version's, on both databases, whoever starts first."""

import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.operations import Operations
from alembic.runtime.migration import MigrationContext

from draftkeep.errors import ConfigError, StoreError
from draftkeep.store import database, migrations, schema
from draftkeep.store.catalog import Catalog

GOLDEN = Path(__file__).parents[1] / "golden" / "catalog-v1.sql"


def differences(catalog: Catalog) -> list[object]:
    """What Alembic would change to make the database what `schema.py` says."""
    with catalog.read() as connection:
        context = MigrationContext.configure(
            connection, opts={"compare_type": True, "compare_server_default": True}
        )
        return list(compare_metadata(context, schema.metadata))


def test_numbers_go_up_by_one_and_end_at_this_version() -> None:
    assert list(migrations.known()) == list(range(1, schema.SCHEMA_VERSION + 1))


def test_a_fresh_catalog_is_what_the_schema_says(bare_url: str) -> None:
    catalog = Catalog.connect(bare_url)
    assert differences(catalog) == []
    with catalog.read() as connection:
        assert migrations.version_of(connection) == schema.SCHEMA_VERSION
        checks = {
            check["name"]
            for table in schema.metadata.tables
            for check in sa.inspect(connection).get_check_constraints(table)
        }
    assert checks >= {"erasures_state", "tombstones_kind", "drafters_status", "jobs_state"}
    catalog.close()


def test_the_comparison_would_notice(bare_url: str) -> None:
    catalog = Catalog.connect(bare_url)
    with catalog.begin() as connection:
        connection.execute(sa.text("DROP INDEX trace_ids_by_subject"))
        connection.execute(sa.text("ALTER TABLE nodes DROP COLUMN revoked_s"))
    assert len(differences(catalog)) == 2
    catalog.close()


def test_a_catalog_from_before_migrations_goes_on_with_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    with sqlite3.connect(path) as old:
        old.executescript(GOLDEN.read_text(encoding="utf-8"))
    old.close()
    catalog = Catalog.open(path)
    assert differences(catalog) == []
    with catalog.read() as connection:
        shard = connection.execute(sa.select(schema.shards)).one()
        traces = connection.execute(
            sa.select(schema.trace_ids.c.shard).order_by(schema.trace_ids.c.trace_id)
        )
        assert (shard.name, shard.rows) == ("1800000000-54545454-a.parquet", 2)
        assert list(traces.scalars()) == [shard.id, None]
        assert connection.scalar(sa.select(schema.offsets.c.next)) == 7
        assert connection.scalar(sa.select(schema.jobs.c.record)) == {"steps": 7}
    catalog.close()


def _insert_shards(connection: sa.Connection, *names: str) -> None:
    # As every version may; `schema.py` knows only what the last one has.
    columns = "name, format, bucket_s, target, rows, bytes, sha256, created_s"
    for name in names:
        statement = f"INSERT INTO shards ({columns}) VALUES (:name, 1, 9, :t, 2, 3, :t, 0.5)"  # noqa: S608
        connection.execute(sa.text(statement), {"name": name, "t": b"T"})


@pytest.mark.parametrize("since", range(1, schema.SCHEMA_VERSION + 1))
def test_a_shards_id_is_never_given_again(bare_url: str, since: int) -> None:
    """Processes remember ids from one transaction to the next."""
    engine = database.make_engine(bare_url)
    with database.migrating(engine) as connection:
        migrations.upgrade(connection, dict(list(migrations.known().items())[:since]))
    with database.migrating(engine) as connection:
        _insert_shards(connection, "a", "b", "c")
        before = connection.execute(sa.text("SELECT * FROM shards ORDER BY id")).all()
    engine.dispose()
    catalog = Catalog.connect(bare_url)
    with catalog.read() as connection:
        query = sa.text("SELECT * FROM shards ORDER BY id")
        assert connection.execute(query).all() == before
    given = {row.id for row in before}
    for name in ("d", "e"):
        with catalog.begin() as connection:
            connection.execute(sa.delete(schema.shards))
            _insert_shards(connection, name)
            (fresh,) = connection.scalars(sa.select(schema.shards.c.id))
        assert fresh > max(given)
        given.add(fresh)
    with pytest.raises(sa.exc.IntegrityError), catalog.begin() as connection:
        _insert_shards(connection, "e")
    catalog.close()


def _add_a_column(op: Operations) -> None:
    with op.batch_alter_table("nodes") as table:
        table.add_column(sa.Column("place", sa.Text, nullable=False, server_default="here"))
        table.alter_column("public_key", new_column_name="key")


def _fail(op: Operations) -> None:
    op.drop_table("trace_ids")
    raise RuntimeError("stop")


LATER = schema.SCHEMA_VERSION + 1


def test_a_later_migration_changes_a_table_that_others_refer_to(catalog: Catalog) -> None:
    """SQLite makes such a table anew; the rows that refer to it must stay."""
    nodes, tenants = schema.nodes, schema.node_tenants
    with catalog.begin() as connection:
        connection.execute(sa.insert(nodes).values(name="n1", public_key=b"k", enrolled_s=1.0))
        connection.execute(sa.insert(tenants).values(node="n1", tenant="acme"))
    with database.migrating(catalog.engine) as connection:
        assert migrations.upgrade(connection, {LATER: _add_a_column}) == LATER
    with catalog.read() as connection:
        found = connection.execute(sa.text('SELECT place, "key" FROM nodes')).all()
        assert [(place, bytes(key)) for place, key in found] == [("here", b"k")]
        assert connection.scalar(sa.select(tenants.c.node)) == "n1"
        assert migrations.version_of(connection) == LATER
    with pytest.raises(sa.exc.IntegrityError), catalog.begin() as connection:
        connection.execute(sa.delete(nodes))


def test_a_migration_that_fails_leaves_the_catalog_as_it_was(catalog: Catalog) -> None:
    steps = {LATER: _add_a_column, LATER + 1: _fail}
    with pytest.raises(RuntimeError, match="stop"), database.migrating(catalog.engine) as opened:
        migrations.upgrade(opened, steps)
    assert differences(catalog) == []
    with catalog.read() as connection:
        assert migrations.version_of(connection) == schema.SCHEMA_VERSION


def test_what_is_done_is_not_done_again(catalog: Catalog) -> None:
    for _ in range(2):
        with database.migrating(catalog.engine) as connection:
            assert migrations.upgrade(connection, {LATER: _add_a_column}) == LATER


def test_rows_that_refer_to_nothing_stop_a_migration(tmp_path: Path) -> None:
    catalog = Catalog.open(tmp_path / "catalog.db")
    with sqlite3.connect(tmp_path / "catalog.db") as raw:
        raw.execute("INSERT INTO node_tenants VALUES ('nobody', 'acme')")
    raw.close()
    with (
        pytest.raises(StoreError, match="a row in node_tenants that refers to nothing in nodes"),
        database.migrating(catalog.engine) as connection,
    ):
        migrations.upgrade(connection, {LATER: _add_a_column})
    assert differences(catalog) == []
    catalog.close()


def test_a_command_that_only_looks_makes_no_catalog(bare_url: str) -> None:
    with pytest.raises(ConfigError, match="no catalog at"):
        Catalog.connect(bare_url, create=False)
    engine = database.make_engine(bare_url)
    with engine.connect() as connection:
        assert sa.inspect(connection).get_table_names() == []
    engine.dispose()
    Catalog.connect(bare_url).close()
    Catalog.connect(bare_url, create=False).close()


def test_a_command_that_only_looks_migrates_nothing(bare_url: str) -> None:
    engine = database.make_engine(bare_url)
    earlier = dict(list(migrations.known().items())[:-1])
    with database.migrating(engine) as connection:
        before = migrations.upgrade(connection, earlier)
    with pytest.raises(StoreError, match="copy the catalog, then start the service"):
        Catalog.connect(bare_url, create=False, migrate=False)
    with engine.connect() as connection:
        assert migrations.version_of(connection) == before
    engine.dispose()
    Catalog.connect(bare_url).close()
    Catalog.connect(bare_url, create=False, migrate=False).close()
