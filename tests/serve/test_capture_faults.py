"""Capture never harms serving: whatever fails behind it, answers stay the same and drops are
counted."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from draftkeep.ingest.emitter import Emitter
from draftkeep.ingest.group_writer import GroupWriter
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.serve import node as node_module
from draftkeep.serve.sealing import PublishingSealer
from draftkeep.store.schema import drops
from tests.serve.station import slow_log


def ask(station: Any, count: int = 6) -> list[Any]:
    return [station.chat(seed=seed, max_tokens=6)["choices"] for seed in range(count)]


def failing(error: Exception) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


@pytest.fixture(scope="module")
def expected(station: Any) -> list[Any]:
    """What a healthy node answers."""
    return ask(station)


@pytest.mark.parametrize(
    ("owner", "method", "error", "reasons", "logged"),
    [
        (
            SqliteLog,
            "append",
            OSError(28, "broken"),
            {"log_failed", "breaker_open"},
            "a trace was dropped: log_failed",
        ),
        (
            PublishingSealer,
            "seal",
            RuntimeError("broken"),
            {"seal_failed", "breaker_open"},
            "a trace was dropped: seal_failed",
        ),
        (
            Emitter,
            "offer",
            RuntimeError("broken"),
            {"emitter_failed"},
            "offering a trace failed with RuntimeError",
        ),
    ],
    ids=["log", "sealer", "offer"],
)
def test_what_fails_is_counted_and_changes_no_answer(
    stations: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    expected: list[Any],
    caplog: pytest.LogCaptureFixture,
    owner: Any,
    method: str,
    error: Exception,
    reasons: set[str],
    logged: str,
) -> None:
    monkeypatch.setattr(owner, method, failing(error))
    station = stations()
    with caplog.at_level(logging.WARNING):
        assert ask(station) == expected
        station.wait_for(lambda: station.node.capture.pending == 0)
    assert logged in caplog.messages
    assert "broken" not in caplog.text
    stats = station.capture_stats()
    assert stats["acknowledged"] == 0
    assert sum(stats["drops"].values()) == 6
    assert set(stats["drops"]) <= reasons


def test_a_slow_log_fills_the_queue_and_delays_nobody(
    stations: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, expected: list[Any]
) -> None:
    go = slow_log(monkeypatch)
    station = stations(capture={"queue_traces": 2})
    assert ask(station) == expected
    station.wait_for(lambda: station.node.capture._open == 0)
    dropped = station.node.capture.drops()
    go.set()
    stats = station.capture_stats()
    assert set(dropped) == {"queue_full"}
    assert stats["acknowledged"] == len(station.captured()) == 6 - dropped["queue_full"] > 0


def test_a_hanging_log_does_not_hold_up_the_end(
    stations: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hangs, go, insert = threading.Event(), threading.Event(), GroupWriter._insert

    def hanging(self: GroupWriter, appends: Any) -> list[int]:
        hangs.set()
        go.wait()
        return insert(self, appends)

    monkeypatch.setattr(GroupWriter, "_insert", hanging)
    monkeypatch.setattr(node_module, "DRAIN_TIMEOUT_S", 1.0)
    station = stations()
    ask(station, 3)
    assert hangs.wait(60)
    station.node.close()
    station.wait_for(lambda: sum(station.node.capture.drops().values()) == 3)
    drops = station.node.capture.drops()
    assert set(drops) <= {"closed", "log_failed"}
    assert drops["log_failed"] >= 1
    assert station.node.capture.acknowledged == station.node.capture.pending == 0
    go.set()


def test_a_log_at_its_cap_is_counted(
    stations: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, expected: list[Any]
) -> None:
    station = stations(log={"cap_bytes": 1024**2}, capture={"k": 255})
    long = {"model": "tiny", "prompt": "x", "max_tokens": 250, "ignore_eos": True}
    while not station.capture_stats()["drops"]:
        station.post("/v1/completions", long)
    assert ask(station) == expected
    stats = station.capture_stats()
    assert stats["drops"]["log_full"] >= 1
    assert stats["acknowledged"] == len(station.captured()) >= 1


def test_unusable_keys_leave_the_node_serving(
    stations: Callable[..., Any], tmp_path: Path, expected: list[Any]
) -> None:
    blocked = tmp_path / "keys"
    blocked.write_text("a file where a directory must be")
    station = stations(keys_dir=blocked)
    assert ask(station) == expected
    assert station.capture_stats() == {
        "acknowledged": 0,
        "declined": {},
        "drops": {"unavailable": 6},
        "pending": 0,
        "cut": 0,
    }
    body = {"tenant": "acme", "subject": "someone"}
    assert station.admin("POST", "/admin/erase", body).status_code == 503


def test_an_unusable_log_leaves_the_node_serving(
    stations: Callable[..., Any], tmp_path: Path, expected: list[Any]
) -> None:
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "log").write_text("a file where a directory must be")
    station = stations()
    assert ask(station) == expected
    assert station.capture_stats()["drops"] == {"unavailable": 6}
    body = {"tenant": "acme", "subject": "someone"}
    assert station.admin("POST", "/admin/erase", body).json()["traces"] == 0


def test_losses_alone_reach_the_catalog_and_a_locked_catalog_loses_none(
    stations: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Emitter, "offer", failing(RuntimeError("broken")))
    station = stations()
    station.node.housekeeper.stop()
    assert station.node.housekeeper.join(60)
    reporter, catalog = station.node._drops, station.node.catalog

    def stored() -> dict[str, int]:
        with catalog.read() as connection:
            rows = connection.execute(
                sa.select(drops.c.reason, sa.func.sum(drops.c.count)).group_by(drops.c.reason)
            )
            return {reason: int(count) for reason, count in rows}

    station.chat(max_tokens=1)
    station.chat(max_tokens=1, store=False)
    assert station.capture_stats()["drops"] == {"emitter_failed": 1}
    with monkeypatch.context() as broken:
        broken.setattr(catalog, "begin", failing(OSError("locked")))
        reporter.report()
    assert stored() == {}
    station.chat(max_tokens=1)
    assert station.capture_stats()["declined"] == {"store_false": 1}
    reporter.report()
    reporter.report()
    assert stored() == {"emitter_failed": 2}
