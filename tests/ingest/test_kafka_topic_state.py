"""What brokers say of themselves while the cluster does not count with them."""

import time
from collections.abc import Callable

from draftkeep.errors import StoreError
from draftkeep.ingest.kafka_topic_state import running_brokers
from tests.services.kafka import Kafka

FENCED_SOON = {"broker.session.timeout.ms": "1000", "broker.heartbeat.interval.ms": "300"}
FROZEN_S, LOOKED_AT_S = 2.5, 0.5


def test_a_broker_that_was_away_is_named_or_it_is_said_that_none_is_in_service(
    kafka_cluster: Callable[..., Kafka],
) -> None:
    """After a pause the broker answers while the cluster has given it up, for milliseconds."""
    kafka = kafka_cluster(extra=FENCED_SOON)
    (node,) = kafka.nodes
    found: set[tuple[int, ...] | str] = set()
    with kafka.access.admin() as admin:
        for _ in range(5):
            node.freeze()
            time.sleep(FROZEN_S)
            node.thaw()
            until_s = time.monotonic() + LOOKED_AT_S
            while time.monotonic() < until_s:
                try:
                    found.add(tuple(running_brokers(admin)))
                except StoreError as error:
                    found.add(str(error).partition(";")[0])
    assert (node.id,) in found
    assert found <= {(node.id,), "none of the brokers is in service yet"}
