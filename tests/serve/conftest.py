"""What the tests of the serving room share: a laboratory for engines, nodes over the toy target."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftkeep.policies.signing import SigningKey
from draftkeep.serve.node import Node
from draftkeep.store.anchors import GATE, publish_anchor
from draftkeep.store.models.drafter import cold_drafter, save_drafter
from draftkeep.store.models.target import TargetModel, load_target
from tests.clock import Clock
from tests.serve.lab import Lab
from tests.serve.station import Station, StepGate, configuration


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def lab() -> Lab:
    return Lab()


@pytest.fixture(scope="session")
def tiny() -> TargetModel:
    return load_target("tiny")


@pytest.fixture(scope="session")
def fresh_target(tiny: TargetModel) -> Callable[[], TargetModel]:
    """A copy for one node: a model belongs to its engine."""
    return lambda: replace(tiny, model=copy.deepcopy(tiny.model))


@pytest.fixture
def stations(
    tmp_path: Path, fresh_target: Callable[[], TargetModel]
) -> Iterator[Callable[..., Station]]:
    """Starts nodes; sections of the configuration by keyword. All are stopped at the end."""
    started: list[Station] = []

    def start(**sections: Any) -> Station:
        config = configuration(tmp_path / "state", **sections)
        station = Station(Node(config, fresh_target()), config)
        started.append(station)
        return station

    yield start
    for station in started:
        station.stop()


@pytest.fixture
def gate(stations: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[StepGate]:
    """Holds the engine of every station; opened before they are stopped."""
    gate = StepGate(monkeypatch)
    yield gate
    gate.error = None
    gate.open()


@pytest.fixture(scope="module")
def station(
    tmp_path_factory: pytest.TempPathFactory, fresh_target: Callable[[], TargetModel]
) -> Iterator[Station]:
    """One node for tests that leave nothing behind but counts."""
    config = configuration(tmp_path_factory.mktemp("station"))
    station = Station(Node(config, fresh_target()), config)
    yield station
    station.stop()


@pytest.fixture
def publish(tiny: TargetModel) -> Callable[..., bytes]:
    """Makes, signs and registers a cold drafter of a station's node; returns its digest."""

    def make(
        station: Station, *, scope: str = "everyone", inputs: Any = (), vocab: int = 128
    ) -> bytes:
        config, registry = station.config, station.node.registry
        gate = SigningKey.load_or_create(config.keys_path / "gate.key")
        publish_anchor(config.state_dir, GATE, gate.public)
        drafter = cold_drafter(tiny, layers=1, vocab=vocab)
        digest = save_drafter(drafter, config.state_dir / "drafters", created_s=0)
        registry.register(digest, scope=scope, inputs=inputs, at_s=0.0)
        registry.admit(digest, gate.sign)
        return digest

    return make
