"""A PostgreSQL that is frozen: nobody waits for it for ever, and nobody gives up one that works."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import sqlalchemy as sa

from draftkeep.errors import PermanentError, StoreError
from draftkeep.store import database, schema
from draftkeep.store.catalog import Catalog
from draftkeep.store.drops import add_drops
from tests.services.postgres import Postgres, running_postgres
from tests.services.processes import free_port

QUIET_S = 1.0


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    """A server that may be frozen."""
    with running_postgres() as running:
        yield running


@pytest.fixture
def hasty(server: Postgres) -> Iterator[Catalog]:
    """A catalog that asks whether the server is there when it was silent for QUIET_S."""
    # The shortest that psycopg takes.
    url = server.create_database()
    Catalog.connect(url).close()
    catalog = Catalog(database.make_engine(f"{url}?connect_timeout=2", quiet_s=QUIET_S))
    yield catalog
    server.thaw()
    catalog.close()


def read(catalog: Catalog) -> list[str]:
    with catalog.read() as connection:
        return list(connection.scalars(sa.select(schema.drops.c.source)))


def write(catalog: Catalog) -> None:
    with catalog.begin() as connection:
        add_drops(connection, "node", {"x": 1}, 0.0)


def write_many(catalog: Catalog) -> None:
    with catalog.begin() as connection:
        row = {"source": "node", "reason": "y", "hour_s": 0, "count": 1}
        database.insert_many(connection, schema.drops, [row])


@pytest.mark.parametrize("act", [read, write])
def test_a_pooled_connection_to_a_frozen_server_is_given_up_and_so_is_a_fresh_one(
    server: Postgres, hasty: Catalog, act: Callable[[Catalog], object]
) -> None:
    assert read(hasty) == []
    server.freeze()
    for _ in range(2):
        with pytest.raises(StoreError, match="cannot be used"):
            act(hasty)
    server.thaw()
    write(hasty)
    assert read(hasty) == ["node"]


@pytest.mark.parametrize("act", [read, write, write_many])
def test_a_server_that_freezes_in_the_middle_of_a_transaction_is_given_up(
    server: Postgres, hasty: Catalog, act: Callable[[Catalog], object]
) -> None:
    def freeze(_connection: object) -> None:
        server.freeze()

    sa.event.listen(hasty.engine, "begin", freeze)
    with pytest.raises(StoreError) as caught:
        act(hasty)
    assert not isinstance(caught.value, PermanentError)
    sa.event.remove(hasty.engine, "begin", freeze)
    server.thaw()
    act(hasty)
    write(hasty)
    assert set(read(hasty)) == {"node"}


def test_a_server_that_freezes_before_the_commit_is_given_up_and_says_for_how_long(
    server: Postgres, hasty: Catalog
) -> None:
    def write_and_freeze() -> None:
        with hasty.begin() as connection:
            add_drops(connection, "node", {"x": 1}, 0.0)
            server.freeze()

    with pytest.raises(StoreError, match=r"did not answer for \d+ s"):
        write_and_freeze()


def test_another_of_several_servers_does_not_answer_for_the_one_that_is_frozen(
    server: Postgres,
) -> None:
    url = sa.make_url(server.create_database())
    Catalog.connect(url.render_as_string()).close()
    # The second refuses at once.
    both = {"host": "127.0.0.1,127.0.0.1", "port": f"{server.port},{free_port()}"}
    several = url.set(host="", port=None, query={**both, "connect_timeout": "2"})
    catalog = Catalog(database.make_engine(several.render_as_string(), quiet_s=QUIET_S))
    sa.event.listen(catalog.engine, "begin", lambda _connection: server.freeze())
    try:
        with pytest.raises(StoreError, match="did not answer for"):
            write(catalog)
    finally:
        server.thaw()
        catalog.close()


def test_a_statement_may_take_as_long_as_it_likes_while_the_server_answers(hasty: Catalog) -> None:
    with hasty.read() as connection:
        assert connection.scalar(sa.text("SELECT 'done' FROM pg_sleep(4)")) == "done"


def test_a_statement_goes_on_while_the_server_takes_no_other_connection(
    server: Postgres, hasty: Catalog
) -> None:
    name = hasty.engine.url.database
    refuse = sa.create_engine(server.url(), isolation_level="AUTOCOMMIT")
    with refuse.connect() as connection, hasty.read() as reading:
        connection.execute(sa.text(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false"))
        assert reading.scalar(sa.text("SELECT 'done' FROM pg_sleep(4)")) == "done"
    refuse.dispose()


def test_who_waits_for_a_lock_waits_on(hasty: Catalog) -> None:
    held, go, done = threading.Event(), threading.Event(), threading.Event()

    def hold() -> None:
        with hasty.begin():
            held.set()
            go.wait()

    def wait() -> None:
        write(hasty)
        done.set()

    holder, waiter = threading.Thread(target=hold), threading.Thread(target=wait)
    holder.start()
    assert held.wait(60)
    waiter.start()
    time.sleep(5 * QUIET_S)
    go.set()
    holder.join()
    waiter.join()
    assert done.is_set()


def test_parameters_of_the_url_win_over_ours(server: Postgres) -> None:
    engine = database.make_engine(f"{server.url()}?connect_timeout=7&keepalives_idle=3")
    with engine.connect() as connection:
        given = connection.connection.driver_connection.info.get_parameters()  # type: ignore[union-attr]
    engine.dispose()
    assert (given["connect_timeout"], given["keepalives_idle"]) == ("7", "3")
    assert (given["keepalives_count"], given["tcp_user_timeout"]) == ("3", "60000")


def test_a_refused_statement_is_for_an_operator(hasty: Catalog) -> None:
    with pytest.raises(PermanentError, match="refused a statement"), hasty.begin() as connection:
        connection.execute(sa.text("SELECT * FROM nothing_of_ours"))
