"""A node whose PostgreSQL is lost while it starts, or freezes while it serves."""

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from draftkeep.config import Config, RetentionConfig
from draftkeep.errors import StoreError
from draftkeep.policies.keyring import Keyring
from draftkeep.serve import assembly
from draftkeep.serve import node as node_module
from draftkeep.serve.capture import Capture
from draftkeep.serve.catalog_wait import wait_for_catalog
from draftkeep.serve.drops import DropReporter
from draftkeep.serve.node import Node
from draftkeep.store import database
from draftkeep.store.catalog import Catalog
from draftkeep.store.drops import drop_totals
from draftkeep.store.models.target import TargetModel
from draftkeep.store.nodes import enrol_node, node_public
from tests.clock import Clock
from tests.serve.station import Station, configuration, wait_for
from tests.services.postgres import Postgres, running_postgres

PERIOD_S, TTL_S = 3600, 4 * 3600


@pytest.fixture(scope="module")
def server() -> Iterator[Postgres]:
    """A server that may be frozen and crashed."""
    with running_postgres() as running:
        yield running


def on(url: str, directory: Path) -> Config:
    plain = url.replace("+psycopg", "")
    return configuration(directory / "state", catalog={"url": f"{plain}?connect_timeout=2"})


def keyring_with_two_periods(config: Config, clock: Clock) -> Keyring:
    retention = RetentionConfig(period_s=PERIOD_S, ttl_s=TTL_S)
    keyring = Keyring.open(config.keys_path, retention=retention, clock=clock)
    for _ in range(2):
        keyring.ensure_period("acme", clock())
        clock.now_s += PERIOD_S
    return keyring


def test_keys_are_destroyed_at_their_deadline_while_a_node_waits_for_its_catalog(
    tmp_path: Path,
    fresh_target: Callable[[], TargetModel],
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(node_module, "KEEP_HOUSE_S", 0.01)
    config = configuration(tmp_path / "state", retention={"period_s": PERIOD_S, "ttl_s": TTL_S})
    keyring = keyring_with_two_periods(config, clock)
    clock.now_s += TTL_S - 2 * PERIOD_S
    left = []

    def patience(attempt: Callable[[], Any]) -> Any:
        left.append(len(keyring.periods()))
        clock.now_s += PERIOD_S
        wait_for(lambda: keyring.periods() == [])
        return attempt()

    node = Node(config, fresh_target(), patience=patience, clock=clock)
    assert left == [1]
    node.close()
    keyring.close()


def test_a_start_that_is_refused_leaves_no_keyring_open(
    tmp_path: Path, fresh_target: Callable[[], TargetModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed, close = threading.Event(), Keyring.close

    def watched(self: Keyring) -> None:
        close(self)
        closed.set()

    def refuse(_attempt: object) -> Any:
        raise StoreError("no")

    monkeypatch.setattr(Keyring, "close", watched)
    with pytest.raises(StoreError, match="no"):
        Node(configuration(tmp_path / "state"), fresh_target(), patience=refuse)
    assert closed.is_set()


def test_a_catalog_lost_before_the_node_is_enrolled_is_waited_for(
    server: Postgres,
    tmp_path: Path,
    fresh_target: Callable[[], TargetModel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = on(server.create_database(), tmp_path)

    def lost_once(*arguments: Any) -> None:
        monkeypatch.setattr(assembly, "enrol_node", enrol_node)
        server.crash()
        try:
            enrol_node(*arguments)
        finally:
            server.start()

    monkeypatch.setattr(assembly, "enrol_node", lost_once)
    with caplog.at_level(logging.ERROR):
        node = Node(
            config,
            fresh_target(),
            patience=lambda attempt: wait_for_catalog(config, threading.Event(), attempt),
        )
    (said,) = caplog.messages
    assert said.startswith("opening the catalog fails and is tried again: the catalog at ")
    assert node_public(node.catalog, "node-1") is not None
    station = Station(node, config)
    station.chat(max_tokens=2)
    assert len(station.captured()) == 1
    station.stop()


@pytest.fixture
def frozen(
    server: Postgres,
    tmp_path: Path,
    stations: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[[float], Any]]:
    """A station whose PostgreSQL freezes; the argument is for how long a statement is believed."""

    def start(quiet_s: float) -> Any:
        url = server.create_database()
        Catalog.connect(url).close()
        catalog = Catalog(database.make_engine(f"{url}?connect_timeout=2", quiet_s=quiet_s))
        monkeypatch.setattr(Catalog, "configured", lambda _config: catalog)
        station = stations()
        station.chat(max_tokens=2)
        station.capture_stats()
        server.freeze()
        return station

    yield start
    server.thaw()


def test_an_erasure_is_told_that_the_catalog_does_not_answer(
    frozen: Callable[[float], Any],
) -> None:
    answer = frozen(0.3).admin("POST", "/admin/erase", {"tenant": "acme", "subject": "ann"})
    assert answer.status_code == 503
    assert "Nothing was erased: ask again" in answer.text


def test_a_node_ends_though_an_erasure_waits_for_a_frozen_catalog(
    frozen: Callable[[float], Any],
    server: Postgres,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(node_module, "END_TIMEOUT_S", 2)
    station = frozen(3600)
    reached, reach = threading.Event(), station.node.catalog.reach

    def watched() -> None:
        reached.set()
        reach()

    monkeypatch.setattr(station.node.catalog, "reach", watched)
    asking = threading.Thread(
        target=station.admin,
        args=("POST", "/admin/erase", {"tenant": "acme", "subject": "ann"}),
    )
    asking.start()
    assert reached.wait(60)
    with caplog.at_level(logging.CRITICAL):
        station.node.close()
    assert "an erasure" in caplog.messages[0]
    server.thaw()
    asking.join()
    assert station.node.errands.join(60)


def test_a_node_ends_though_a_frozen_catalog_takes_no_report_of_its_drops(
    frozen: Callable[[float], Any],
    server: Postgres,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(node_module, "END_TIMEOUT_S", 2)
    monkeypatch.setattr(node_module, "KEEP_HOUSE_S", 3600)
    node = frozen(3600).node
    node.capture.expired(3)
    closing = threading.Thread(target=node.close)
    closing.start()
    closing.join(60)
    ended = not closing.is_alive()
    server.thaw()
    closing.join()
    wait_for(lambda: "last report" not in {thread.name for thread in threading.enumerate()})
    assert ended
    assert "what was dropped and is not written down: {'log_expired': 3}" in caplog.messages


def test_drops_whose_commit_got_no_answer_are_counted_once(server: Postgres, clock: Clock) -> None:
    url = server.create_database()
    Catalog.connect(url).close()
    catalog = Catalog(database.make_engine(f"{url}?connect_timeout=2", quiet_s=1))
    for restarted, counted in ((False, 5), (True, 10)):
        capture = Capture(
            None, context_tokens=8, chat_template_hash=bytes(32), on_problem=lambda *_: None
        )
        capture.expired(5)
        reporter = DropReporter(capture, catalog, node="node-1", clock=clock)
        if not restarted:
            sa.event.listen(catalog.engine, "commit", lambda _: server.freeze(), once=True)
        reporter.report()
        server.thaw()
        reporter.report()
        with catalog.read() as connection:
            assert drop_totals(connection, "node-1") == {"log_expired": counted}
    catalog.close()
