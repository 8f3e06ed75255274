"""The housekeeper: a round does every chore, and what fails is said and tried again.

Deadlines of keys wait for none of it.
"""

import logging
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa

from draftkeep.config import RetentionConfig
from draftkeep.errors import StoreError
from draftkeep.ingest.trace import Provenance
from draftkeep.policies.keyring import Keyring
from draftkeep.policies.signing import SigningKey
from draftkeep.serve import housekeeping
from draftkeep.serve.capture import Capture
from draftkeep.serve.drops import DropReporter
from draftkeep.serve.housekeeping import Housekeeper
from draftkeep.serve.key_deadlines import KeyDeadlines
from draftkeep.serve.sealing import PublishingSealer
from draftkeep.store.catalog import Catalog
from draftkeep.store.schema import drops, periods
from tests.clock import Clock
from tests.serve.station import wait_for

PERIOD_S, TTL_S = 100, 400
PROVENANCE = Provenance(
    tenant="acme",
    subject=None,
    response_id=bytes(16),
    domain="sql",
    consent=0,
    policy_version=1,
    created_s=0,
    target=bytes(32),
    tokenizer=bytes(32),
)


class House:
    """A keyring with one period, a catalog, one trace lost and one declined, and a housekeeper
    over them."""

    def __init__(self, directory: Path, clock: Clock) -> None:
        self.clock = clock
        self.looks: list[float] = []
        self.unread = 3
        retention = RetentionConfig(period_s=PERIOD_S, ttl_s=TTL_S)
        self.keyring = Keyring.open(directory / "keys", retention=retention, clock=clock)
        self.catalog = Catalog.open(directory / "catalog.db")
        self.period_id = self.keyring.ensure_period("acme", clock()).period_id
        capture = Capture(
            None, context_tokens=8, chat_template_hash=bytes(32), on_problem=lambda *_: None
        )
        self.capture = capture
        assert capture.admit(PROVENANCE) is None
        capture.decline("never")
        self.housekeeper = Housekeeper(
            DropReporter(capture, self.catalog, node="node-1", clock=clock),
            self.keyring,
            self.catalog,
            look=lambda: self.looks.append(clock()),
            expire_log=self.expire_log,
            every_s=0.01,
        )
        self.sealer = PublishingSealer(
            self.keyring.node_keys(),
            "node-1",
            SigningKey(b"s" * 32),
            catalog=self.catalog,
            clock=clock,
        )
        self.deadlines = KeyDeadlines(
            self.keyring, forget=self.sealer.sweep, clock=clock, every_s=0.01
        )

    def expire_log(self) -> None:
        expired, self.unread = self.unread, 0
        self.capture.expired(expired)

    @property
    def holds_key(self) -> bool:
        return self.keyring.period(self.period_id) is not None

    def published(self) -> list[bytes]:
        with self.catalog.read() as connection:
            return list(connection.scalars(sa.select(periods.c.period_id)))

    def reported(self) -> dict[str, int]:
        with self.catalog.read() as connection:
            rows = connection.execute(sa.select(drops.c.reason, drops.c.count)).all()
        return {reason: int(count) for reason, count in rows}

    def close(self) -> None:
        for part in (self.housekeeper, self.deadlines):
            part.stop()
            assert part.join(60)
        self.keyring.close()
        self.catalog.close()


@pytest.fixture
def house(tmp_path: Path, clock: Clock) -> Iterator[House]:
    house = House(tmp_path, clock)
    yield house
    house.close()


def test_a_key_is_destroyed_at_its_deadline_and_not_before(house: House) -> None:
    house.deadlines.keep()
    assert house.holds_key
    house.clock.now_s += TTL_S
    house.deadlines.keep()
    assert not house.holds_key


def test_a_key_past_its_deadline_goes_at_the_start(house: House) -> None:
    house.clock.now_s += TTL_S
    house.deadlines.start()
    assert not house.holds_key


def test_a_deadline_does_not_wait_for_a_database_that_gives_no_answer(
    house: House, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, go = threading.Event(), threading.Event()

    def hangs(*_: object) -> None:
        asked.set()
        go.wait()

    created = replace(PROVENANCE, created_s=int(house.clock()))
    house.sealer.seal(b"body", created, prompt_tokens=1, positions=1)
    monkeypatch.setattr(housekeeping, "publish_periods", hangs)
    house.housekeeper.start()
    house.deadlines.start()
    assert asked.wait(60)
    assert len(house.sealer._shares) == 1
    try:
        house.clock.now_s += PERIOD_S
        wait_for(lambda: house.sealer._shares == {})
        house.clock.now_s += TTL_S - PERIOD_S
        wait_for(lambda: not house.holds_key)
    finally:
        go.set()


def test_a_round_reports_drops(house: House) -> None:
    house.housekeeper.keep()
    assert house.reported() == {"unavailable": 1, "log_expired": 3}


def test_a_round_publishes_deadlines_and_looks_at_the_engine(house: House) -> None:
    assert house.published() == []
    house.housekeeper.keep()
    assert house.published() == [house.period_id]
    assert house.looks == [house.clock.now_s]


def failing(*_: object) -> int:
    raise StoreError("it is locked; try again")


def test_a_chore_that_fails_is_said_keeps_no_other_and_is_tried_again(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as broken, caplog.at_level(logging.ERROR):
        broken.setattr(housekeeping, "publish_periods", failing)
        house.housekeeper.keep()
        house.housekeeper.keep()
    assert house.published() == []
    assert house.reported() == {"unavailable": 1, "log_expired": 3}
    assert caplog.messages == [
        "publishing deadlines fails and is tried again: it is locked; try again"
    ]
    house.housekeeper.keep()
    assert house.published() == [house.period_id]
    assert caplog.messages[1].startswith("publishing deadlines works again, after ")


def test_a_key_that_could_not_be_destroyed_is_said_and_tried_again(
    house: House, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    house.clock.now_s += TTL_S
    with monkeypatch.context() as broken, caplog.at_level(logging.ERROR):
        broken.setattr(house.keyring, "destroy_expired", failing)
        house.deadlines.keep()
        house.deadlines.keep()
    assert house.holds_key
    assert caplog.messages == [
        "destroying expired keys fails and is tried again: it is locked; try again"
    ]
    house.deadlines.keep()
    assert not house.holds_key
    assert caplog.messages[1].startswith("destroying expired keys works again, after ")


def test_the_thread_outlives_a_failure(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, twice = [], threading.Event()
    destroy: Callable[[float], int] = house.keyring.destroy_expired

    def first_fails(now_s: float) -> int:
        tried.append(now_s)
        if len(tried) == 1:
            raise OSError("no disk")
        count = destroy(now_s)
        twice.set()
        return count

    monkeypatch.setattr(house.keyring, "destroy_expired", first_fails)
    house.clock.now_s += TTL_S
    house.deadlines.start()
    assert twice.wait(60)
    assert not house.holds_key
