"""The settings of a broker of the tests: one combined node of a cluster on 127.0.0.1."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.services.certificates import Certificates

_MECHANISM = "SCRAM-SHA-512"

# The broker looks for expired segments every second instead of every five minutes, and from the
# start. A topic made with `SHORT_LIVED` loses its records within about four seconds.
FAST_RETENTION = {
    "log.retention.check.interval.ms": "1000",
    "log.initial.task.delay.ms": "1000",
}
SHORT_LIVED = {
    "message.timestamp.type": "LogAppendTime",
    "retention.ms": "1000",
    "segment.ms": "1000",
    "file.delete.delay.ms": "0",
}
# Segments of the least size that a broker allows, unlinked as soon as they go.
SHORT_SEGMENTS = {"segment.bytes": "1048576", "file.delete.delay.ms": "0"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """Where a node listens: for clients, and for the other controllers.

    Everybody is sent to `advertised`, a proxy's port, where there is one.
    """

    client: int
    controller: int
    advertised: int | None = None

    @property
    def public(self) -> int:
        """The port for clients to use."""
        return self.client if self.advertised is None else self.advertised


@dataclass(frozen=True, slots=True, kw_only=True)
class Scram:
    """TLS and SCRAM: the one user that brokers and clients share."""

    username: str
    password: str
    certificates: Certificates

    @property
    def format_options(self) -> list[str]:
        """What `StorageTool format` needs so that the user exists from the start."""
        return [
            "--add-scram",
            f"{_MECHANISM}=[name={self.username},password={self.password}]",
        ]

    @property
    def broker(self) -> dict[str, str]:
        """The broker's side of it."""
        login = "org.apache.kafka.common.security.scram.ScramLoginModule required"
        return {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self.certificates.broker),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.certificates.authority),
            "sasl.enabled.mechanisms": _MECHANISM,
            "sasl.mechanism.inter.broker.protocol": _MECHANISM,
            "listener.name.sasl_ssl.scram-sha-512.sasl.jaas.config": (
                f'{login} username="{self.username}" password="{self.password}";'
            ),
        }


def node_settings(
    index: int,
    ports: Sequence[Ports],
    *,
    data: Path,
    scram: Scram | None,
    extra: Mapping[str, str],
) -> dict[str, str]:
    """The properties of node `index` of the cluster at `ports`; `extra` wins over all others."""
    own, nodes = ports[index], len(ports)
    protocol = "PLAINTEXT" if scram is None else "SASL_SSL"
    controller = f"CONTROLLER://127.0.0.1:{own.controller}"
    in_sync = str(2 if nodes >= 3 else 1)
    return {
        "process.roles": "broker,controller",
        "node.id": str(index + 1),
        "controller.quorum.voters": ",".join(
            f"{number}@127.0.0.1:{node.controller}" for number, node in enumerate(ports, 1)
        ),
        "listeners": f"{protocol}://127.0.0.1:{own.client},{controller}",
        "advertised.listeners": f"{protocol}://127.0.0.1:{own.public},{controller}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": protocol,
        "listener.security.protocol.map": f"CONTROLLER:PLAINTEXT,{protocol}:{protocol}",
        "log.dirs": str(data),
        "default.replication.factor": str(nodes),
        "min.insync.replicas": in_sync,
        "auto.create.topics.enable": "false",
        "offsets.topic.replication.factor": str(nodes),
        "offsets.topic.num.partitions": "1",
        "transaction.state.log.replication.factor": str(nodes),
        "transaction.state.log.min.isr": in_sync,
        "share.coordinator.state.topic.replication.factor": str(nodes),
        "share.coordinator.state.topic.min.isr": in_sync,
        # Tests do not wait for members that will not come, and learn of a dead one soon.
        "group.initial.rebalance.delay.ms": "0",
        "group.min.session.timeout.ms": "1000",
        # A killed broker is back in 4 seconds with these, in 14 without.
        "broker.session.timeout.ms": "1000",
        "broker.heartbeat.interval.ms": "200",
        **(scram.broker if scram else {}),
        **extra,
    }
