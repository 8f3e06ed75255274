"""What brokers say of themselves while the cluster does not count with them, and do not say."""

import time
from collections.abc import Callable

import pytest
from kafka.admin import ACL, ACLOperation, ACLPermissionType, ResourcePattern, ResourceType

from draftkeep.errors import StoreError
from draftkeep.ingest.kafka_topic_state import (
    broker_settings,
    running_brokers,
    topic_settings_of,
)
from tests.ingest.steady import wait_for
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


WITH_ACLS = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
}


def rule(operation: ACLOperation, permission: ACLPermissionType) -> ACL:
    """For everybody, on the cluster."""
    cluster = ResourcePattern(ResourceType.CLUSTER, "kafka-cluster")
    return ACL("User:*", "*", operation, permission, cluster)


def test_settings_that_may_not_be_read_are_no_settings(
    kafka_cluster: Callable[..., Kafka],
) -> None:
    kafka = kafka_cluster(extra=WITH_ACLS)
    with kafka.access.admin() as admin:
        assert broker_settings(admin)
        with pytest.raises(StoreError, match="settings of topic nowhere cannot be read"):
            topic_settings_of(admin, "nowhere")
        admin.create_acls(
            [
                rule(ACLOperation.ALL, ACLPermissionType.ALLOW),
                rule(ACLOperation.DESCRIBE_CONFIGS, ACLPermissionType.DENY),
            ]
        )

        def refused() -> bool:
            try:
                return not broker_settings(admin)
            except StoreError:
                return True

        wait_for(refused)
        said = "settings of broker 1 cannot be read .*, and that this user may DESCRIBE_CONFIGS"
        with pytest.raises(StoreError, match=said):
            broker_settings(admin)
