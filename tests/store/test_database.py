"""Two databases, one set of promises: who waits for whom, what a failure says, what it hides."""

import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from draftkeep.config import CatalogConfig, Config
from draftkeep.errors import ConfigError, ConflictError, StoreError
from draftkeep.store import database, schema
from draftkeep.store.catalog import Catalog
from draftkeep.store.database import utf8
from draftkeep.store.drops import add_drops
from tests.services.postgres import Postgres, running_postgres

PASSWORD = "tell-nobody"  # noqa: S105
DROPS = sa.select(schema.drops.c.source).order_by(schema.drops.c.source)


def add(catalog: Catalog, source: str, *, shared: bool = False) -> None:
    with catalog.begin(shared=shared) as connection:
        add_drops(connection, source, {"x": 1}, 0.0)


def impatient(catalog: Catalog) -> Catalog:
    """A catalog that waits for a lock for 50 ms only, as BUSY_S would be over."""

    def connected(connection: object, _record: object) -> None:
        cursor = connection.cursor()  # type: ignore[attr-defined]
        if catalog.engine.dialect.name == "sqlite":
            cursor.execute("PRAGMA busy_timeout = 50")
        else:
            cursor.execute("SET lock_timeout = 50")
            connection.commit()  # type: ignore[attr-defined]
        cursor.close()

    sa.event.listen(catalog.engine, "connect", connected)
    catalog.engine.dispose()
    return catalog


def test_a_lock_that_is_not_given_up_is_an_error_and_the_next_try_goes_on(
    catalog: Catalog,
) -> None:
    impatient(catalog)
    with catalog.begin() as holder:
        add_drops(holder, "first", {"x": 1}, 0.0)
        with pytest.raises(StoreError, match="was busy") as caught:
            add(catalog, "second")
        assert not isinstance(caught.value, ConflictError)
    add(catalog, "third")
    with catalog.read() as connection:
        assert list(connection.scalars(DROPS)) == ["first", "third"]


@pytest.mark.parametrize("second_shared", [False, True])
@pytest.mark.parametrize("first_shared", [False, True])
def test_postgresql_lets_only_those_that_share_run_beside_each_other(
    postgres_catalog_url: str, first_shared: bool, second_shared: bool
) -> None:
    catalog = impatient(Catalog.connect(postgres_catalog_url))
    with catalog.begin(shared=first_shared):
        if first_shared and second_shared:
            add(catalog, "beside", shared=True)
        else:
            with pytest.raises(StoreError, match="was busy"):
                add(catalog, "beside", shared=second_shared)
    catalog.close()


def test_a_reader_cannot_write(postgres_catalog_url: str) -> None:
    catalog = Catalog.connect(postgres_catalog_url)
    with pytest.raises(StoreError, match="read-only"), catalog.read() as connection:
        add_drops(connection, "reader", {"x": 1}, 0.0)
    add(catalog, "writer")
    catalog.close()


def test_of_writers_in_a_ring_one_is_told_to_start_again(postgres_catalog_url: str) -> None:
    catalog = Catalog.connect(postgres_catalog_url)
    for source in "ab":
        add(catalog, source)
    met = threading.Barrier(2)
    lost: list[ConflictError] = []

    def write(first: str, second: str) -> None:
        try:
            with catalog.begin(shared=True) as connection:
                add_drops(connection, first, {"x": 1}, 0.0)
                met.wait()
                add_drops(connection, second, {"x": 1}, 0.0)
        except ConflictError as error:
            lost.append(error)

    threads = [threading.Thread(target=write, args=pair) for pair in ("ab", "ba")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [type(error) for error in lost] == [ConflictError]
    with catalog.read() as connection:
        assert list(connection.scalars(sa.select(schema.drops.c.count))) == [2, 2]
    catalog.close()


@pytest.mark.parametrize("text", ["acme", "with \\ and \\001", "größer", "'; --"])
def test_bytes_of_a_text_are_its_utf8(catalog: Catalog, text: str) -> None:
    with catalog.read() as connection:
        given = sa.literal(text, sa.Text)
        assert connection.scalar(sa.select(utf8(given))) == text.encode()


@pytest.fixture(scope="module")
def guarded() -> Iterator[Postgres]:
    """A server whose database `guarded` asks for a password; it may be stopped and started."""
    # Not under pytest's directory: that is root's alone, and the server runs as somebody else.
    with tempfile.TemporaryDirectory() as name:
        rules = Path(name) / "pg_hba.conf"
        rules.write_text(
            "host guarded all 127.0.0.1/32 scram-sha-256\nhost all all 127.0.0.1/32 trust\n"
        )
        rules.parent.chmod(0o755)
        with running_postgres(settings={"hba_file": str(rules)}) as server:
            engine = sa.create_engine(server.url(), isolation_level="AUTOCOMMIT")
            with engine.connect() as connection:
                connection.execute(sa.text(f"ALTER USER draftkeep PASSWORD '{PASSWORD}'"))
                connection.execute(sa.text("CREATE DATABASE guarded"))
            engine.dispose()
            yield server


def configured(server: Postgres, tmp_path: Path, password: str) -> Config:
    file = tmp_path / "password"
    file.write_text(password + "\n")
    url = server.url("guarded").replace("+psycopg", "")
    return Config(state_dir=tmp_path, catalog=CatalogConfig(url=url, password_file=file))


def test_a_configured_catalog_is_opened_with_its_password(
    guarded: Postgres, tmp_path: Path
) -> None:
    config = configured(guarded, tmp_path, PASSWORD)
    catalog = Catalog.configured(config)
    add(catalog, "here")
    assert catalog.place == config.catalog.url
    assert PASSWORD not in repr(catalog.engine)
    catalog.close()
    assert not (tmp_path / "catalog.db").exists()


def test_a_wrong_password_is_an_error_without_it(guarded: Postgres, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="password authentication failed") as caught:
        Catalog.configured(configured(guarded, tmp_path, "wrong-" + PASSWORD))
    assert PASSWORD not in str(caught.value)
    assert "check catalog.url, its password and that the server runs" in str(caught.value)
    assert "+psycopg" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_a_server_that_stops_is_an_error_and_its_return_is_none(
    guarded: Postgres, tmp_path: Path
) -> None:
    catalog = Catalog.configured(configured(guarded, tmp_path, PASSWORD))

    def interrupted() -> None:
        with catalog.begin() as connection:
            add_drops(connection, "lost", {"x": 1}, 0.0)
            guarded.crash()
            add_drops(connection, "lost", {"x": 1}, 0.0)

    failures: list[Callable[[], object]] = [
        interrupted,
        lambda: add(catalog, "down"),
        lambda: Catalog.configured(configured(guarded, tmp_path, PASSWORD)),
    ]
    try:
        for fail in failures:
            with pytest.raises(StoreError, match="cannot be used") as caught:
                fail()
            assert PASSWORD not in str(caught.value)
    finally:
        guarded.start()
    add(catalog, "after")
    with catalog.read() as connection:
        assert "after" in set(connection.scalars(DROPS))
        assert "lost" not in set(connection.scalars(DROPS))
    catalog.close()


@pytest.mark.parametrize("url", ["mysql://u:tell-nobody@h/d", "tell-nobody", "a://u:p@h:tell/d"])
def test_a_url_that_cannot_be_is_refused_and_not_shown(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Catalog.connect(url)
    assert "tell" not in str(caught.value)


def test_a_directory_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    place = tmp_path / "catalog.db"
    place.mkdir()
    with pytest.raises(StoreError, match="cannot be used"):
        Catalog.open(place)


def test_a_silent_writer_is_cut_off(
    postgres_catalog_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frozen process holds its locks; the server must not wait for it for ever."""
    monkeypatch.setattr(database, "_SILENT_S", 1.0)
    catalog = Catalog.connect(postgres_catalog_url)
    other = Catalog.connect(postgres_catalog_url)

    def write_and_freeze() -> None:
        with catalog.begin() as connection:
            add_drops(connection, "silent", {"x": 1}, 0.0)
            add(other, "waited")
            add_drops(connection, "silent", {"x": 1}, 0.0)

    with pytest.raises(StoreError, match="cannot be used"):
        write_and_freeze()
    with other.read() as connection:
        assert list(connection.scalars(DROPS)) == ["waited"]
    catalog.close()
    other.close()


@pytest.mark.parametrize("many", [False, True])
def test_a_value_that_a_column_cannot_hold_is_an_error_without_the_value(
    postgres_catalog_url: str, many: bool
) -> None:
    catalog = Catalog.connect(postgres_catalog_url)
    node = {"name": "sec\0ret", "public_key": b"", "enrolled_s": 0.0, "revoked_s": None}

    def insert() -> None:
        with catalog.begin() as connection:
            if many:
                database.insert_many(connection, schema.nodes, [node])
            else:
                connection.execute(sa.insert(schema.nodes).values(node))

    with pytest.raises(StoreError, match="cannot hold a value") as caught:
        insert()
    assert "sec" not in "".join(traceback.format_exception(caught.value))
    catalog.close()


def test_an_error_of_the_database_shows_no_parameters(catalog: Catalog) -> None:
    row = {"name": "secret", "public_key": b"", "enrolled_s": 0.0}
    with pytest.raises(sa.exc.IntegrityError) as caught, catalog.begin() as connection:
        connection.execute(sa.insert(schema.nodes).values([row, row]))
    assert "parameters: " not in str(caught.value)


def test_many_rows_are_inserted_or_none(catalog: Catalog) -> None:
    rows = [
        {"name": f"n{number}", "public_key": b"\x00\\'" * 11, "enrolled_s": 1.5}
        for number in range(3)
    ]
    rows = [row | {"revoked_s": None if row["name"] == "n1" else 2.0} for row in rows]
    with catalog.begin() as connection:
        database.insert_many(connection, schema.nodes, rows)
    with pytest.raises(sa.exc.IntegrityError), catalog.begin() as connection:
        database.insert_many(connection, schema.nodes, [rows[0] | {"name": "n9"}, rows[1]])
    with catalog.read() as connection:
        found = connection.execute(sa.select(schema.nodes).order_by(schema.nodes.c.name))
        assert [dict(row) for row in found.mappings()] == rows
