"""The laboratory and the stations of the service's own tests, for the replays of public faults."""

from collections.abc import Callable, Iterator

import pytest

from draftkeep.serve.node import Node
from draftkeep.store.models.target import TargetModel
from tests.faults.house import House
from tests.serve.conftest import fresh_target as fresh_target
from tests.serve.conftest import gate as gate
from tests.serve.conftest import lab as lab
from tests.serve.conftest import stations as stations
from tests.serve.conftest import tiny as tiny
from tests.serve.station import Station, configuration


@pytest.fixture(scope="module")
def house(
    tmp_path_factory: pytest.TempPathFactory,
    tiny: TargetModel,
    fresh_target: Callable[[], TargetModel],
) -> Iterator[House]:
    """A served node whose drafter is a copy of its target, so that blocks fill up."""
    config = configuration(
        tmp_path_factory.mktemp("house"), serve={"lookahead": 5, "follow_s": 3600}
    )
    node = Node(config, fresh_target())
    station = Station(node, config)
    yield House(station, tiny.model)
    station.stop()
