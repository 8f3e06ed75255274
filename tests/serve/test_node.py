"""A node's start and end: what refuses a start, what only costs capture, and what close does."""

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftkeep.config import Config
from draftkeep.errors import ModelError, StoreError
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.policies.keyring import Keyring
from draftkeep.serve import node as node_module
from draftkeep.serve.node import Node
from draftkeep.serve.sealing import PublishingSealer
from draftkeep.store.models.target import TargetModel
from draftkeep.store.nodes import node_public
from draftkeep.store.periods import load_periods
from tests.serve.station import slow_log, wait_for

# A request that is under way until it is told to end.
LONG = {"model": "tiny", "prompt": "x", "max_tokens": 100, "ignore_eos": True}


def test_a_model_that_cannot_be_had_refuses_the_start(tmp_path: Path) -> None:
    config = Config.model_validate(
        {"state_dir": tmp_path, "model": {"target": str(tmp_path / "nothing")}}
    )
    with pytest.raises(ModelError, match="no target named"):
        Node.build(config)


def test_a_catalog_that_is_none_refuses_the_start(
    tmp_path: Path, fresh_target: Callable[[], TargetModel]
) -> None:
    (tmp_path / "catalog.db").write_bytes(b"no database " * 500)
    config = Config.model_validate({"state_dir": tmp_path})
    with pytest.raises(StoreError, match="catalog"):
        Node(config, fresh_target())


def test_the_model_id_is_never_a_path(
    tmp_path: Path, fresh_target: Callable[[], TargetModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "my-model"
    home.mkdir()
    monkeypatch.chdir(home)
    for number, name in enumerate([str(home), f"{home}/", ".", "owner/my-model"]):
        config = Config.model_validate({"state_dir": tmp_path / str(number)})
        node = Node(config, replace(fresh_target(), name=name))
        assert node.model_id == "my-model"
        node.close()


def test_a_node_enrols_itself_and_publishes_its_periods(stations: Callable[..., Any]) -> None:
    station = stations()
    station.chat(max_tokens=2)
    ((header, _),) = station.captured()
    catalog = station.node.catalog
    assert node_public(catalog, "node-1") is not None
    with catalog.read() as connection:
        (published,) = load_periods(connection, [header.period_id]).values()
    assert published.record.tenant == "acme"
    assert published.record.destroy_at_s == header.expiry_s


@pytest.mark.parametrize("broken", ["groups", "metrics", "requests"])
def test_a_counter_that_fails_costs_no_trace(
    stations: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    station = stations()

    def fail(finished: object) -> None:
        raise ValueError("no")

    name = "add" if broken == "groups" else "finished"
    monkeypatch.setattr(getattr(station.node, broken), name, fail)
    station.chat(max_tokens=2)
    assert len(station.captured()) == 1
    assert station.node.capture.pending == 0


def test_without_its_keyring_a_node_serves_and_says_what_stays_undone(
    stations: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "state" / "keys"
    keys.mkdir(parents=True)
    (keys / "keyring.db").write_bytes(b"no database " * 500)
    station = stations()
    station.chat(max_tokens=2)
    assert station.node.capture.drops() == {"unavailable": 1}
    said = [message for message in caplog.messages if "serving without a keyring" in message]
    assert len(said) == 1
    assert "no expired key is destroyed until a start can open it: keyring.db: " in said[0]


def test_close_delivers_what_waits(
    stations: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    go = slow_log(monkeypatch)
    station = stations()
    for _ in range(5):
        station.chat(max_tokens=2)
    threading.Timer(0.05, go.set).start()
    station.node.close()
    assert station.node.capture.acknowledged == 5
    assert station.node.capture.pending == 0


def test_close_tells_requests_under_way(stations: Callable[..., Any], gate: Any) -> None:
    station = stations()
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(station.post("/v1/completions", LONG)))
    waiting.start()
    assert gate.waiting.wait(60)
    closing = threading.Thread(target=station.node.close)
    closing.start()
    station.wait_for(lambda: station.node.engine_thread.stopping)
    gate.open()
    waiting.join()
    closing.join()
    assert answers[0].status_code == 503


def test_close_tells_streams_under_way_what_it_tells_everyone(
    stations: Callable[..., Any], gate: Any
) -> None:
    station = stations()
    events: list[Any] = []
    body = LONG | {"stream": True}
    reader = threading.Thread(target=lambda: events.extend(station.stream("/v1/completions", body)))
    reader.start()
    gate.allow(2)
    station.wait_for(lambda: station.node.engine.stats().output_tokens == 2)
    assert gate.waiting.wait(60)
    closing = threading.Thread(target=station.node.close)
    closing.start()
    station.wait_for(lambda: station.node.engine_thread.stopping)
    gate.open()
    reader.join()
    closing.join()
    assert events[0]["choices"]
    assert events[-1]["error"]["type"] == "service_unavailable_error"


def test_a_step_that_does_not_end_leaves_the_files_open(
    stations: Callable[..., Any],
    gate: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(node_module, "END_TIMEOUT_S", 2)
    station = stations()
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(station.post("/v1/completions", LONG)))
    waiting.start()
    assert gate.waiting.wait(60)
    with caplog.at_level(logging.CRITICAL):
        station.node.close()
    (said,) = caplog.messages
    assert said.startswith("the engine did not end within 2 s; keyring, catalog and log")
    assert station.node.follower.join(60)
    assert station.node.housekeeper.join(60)
    assert not station.node.ready
    # The keyring, the catalog and the log's emitter are still what the engine knew.
    assert station.node.erase("acme", "nobody").aliases == 0
    assert station.node.capture.drops() == {}
    gate.open()
    waiting.join()
    assert answers[0].status_code == 503
    assert station.node.engine_thread.join(60)


def test_what_was_captured_is_delivered_while_a_step_does_not_end(
    stations: Callable[..., Any], gate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "END_TIMEOUT_S", 2)
    go = slow_log(monkeypatch)
    station = stations()
    node = station.node
    gate.allow(1)
    assert station.post("/v1/completions", LONG | {"max_tokens": 1}).status_code == 200
    station.wait_for(lambda: node.engine.stats().known == 0)
    waiting = threading.Thread(target=station.post, args=("/v1/completions", LONG))
    waiting.start()
    assert gate.waiting.wait(60)
    assert node.capture.stats().acknowledged == 0
    closing = threading.Thread(target=node.close)
    closing.start()
    go.set()
    closing.join()
    assert node.capture.stats().acknowledged == 1
    gate.open()
    waiting.join()
    assert node.engine_thread.join(60)


def test_deadlines_do_not_wait_for_the_follower(
    stations: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "KEEP_HOUSE_S", 0.01)
    due, destroy = threading.Event(), Keyring.destroy_expired

    def watched(self: Keyring, now_s: float) -> int:
        due.set()
        return destroy(self, now_s)

    monkeypatch.setattr(Keyring, "destroy_expired", watched)
    stations(serve={"follow_s": 3600}, capture={"enabled": False})
    assert due.wait(60)


def test_what_the_sealer_remembers_goes_with_the_keys_and_waits_for_no_catalog(
    stations: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_module, "KEEP_HOUSE_S", 0.01)
    swept, sweep, by = threading.Event(), PublishingSealer.sweep, set()

    def watched(self: PublishingSealer) -> None:
        sweep(self)
        by.add(threading.current_thread().name)
        swept.set()

    monkeypatch.setattr(PublishingSealer, "sweep", watched)
    stations()
    assert swept.wait(60)
    assert by == {"key deadlines"}


@pytest.mark.parametrize("enabled", [True, False])
def test_a_shorter_ttl_reaches_the_catalog_for_periods_of_the_past(
    stations: Callable[..., Any], enabled: bool
) -> None:
    first = stations(retention={"period_s": 3600, "ttl_s": 7 * 86400})
    first.chat(max_tokens=2)
    ((header, _),) = first.captured()
    first.node.close()
    again = stations(retention={"period_s": 3600, "ttl_s": 6 * 3600}, capture={"enabled": enabled})
    with again.node.catalog.read() as connection:
        (published,) = load_periods(connection, [header.period_id]).values()
    assert published.record.destroy_at_s < header.expiry_s
    assert published.record.destroy_at_s <= header.expiry_s - 6 * 86400
    assert published.issued_expiry_s == header.expiry_s


def test_what_nobody_read_before_its_deadline_leaves_the_log_and_counts_as_lost(
    stations: Callable[..., Any],
) -> None:
    station = stations(retention={"period_s": 1, "ttl_s": 4})
    for _ in range(2):
        station.chat(max_tokens=2)
    wait_for(lambda: station.node.capture.acknowledged == 2)
    # Its own rounds would count beside those of the test.
    station.node.housekeeper.stop()
    assert station.node.housekeeper.join(60)
    log = SqliteLog.open_reader(station.config.log_path)

    def emptied() -> bool:
        station.node.housekeeper.keep()
        first, following = log.bounds()
        return bool(first == following)

    wait_for(emptied)
    assert log.bounds() == (2, 2)
    assert station.node.capture.drops() == {"log_expired": 2}
