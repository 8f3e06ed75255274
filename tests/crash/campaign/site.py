"""Where a campaign happens: keys, catalog, topic, and one configuration for every process."""

import contextlib
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftkeep.config import Config
from draftkeep.errors import StoreError
from draftkeep.ingest.kafka_topic import create_topic
from draftkeep.policies.keyring import Keyring
from draftkeep.policies.signing import SigningKey
from draftkeep.store.anchors import ISSUER, publish_anchor
from draftkeep.store.catalog import Catalog
from draftkeep.store.erasure import erase_subject
from draftkeep.store.nodes import enrol_node
from tests.crash.campaign.plan import Plan
from tests.services.kafka import Kafka
from tests.services.postgres import Postgres

TENANT = "acme"
# Subjects that are erased while the campaign runs: a number follows.
DOOMED_PREFIX = "doomed-"
DOOMED = 8
# Short periods, so that a batch holds several of them and shards stay small.
_PERIOD_S = 20
_TTL_S = 86_400
_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The directories, the broker and the database, with what the caller itself needs of them.

    The keyring and the catalog are the caller's; every child opens its own.
    """

    directory: Path
    config: Config
    kafka: Kafka
    postgres: Postgres
    keyring: Keyring
    catalog: Catalog

    @property
    def acks_dir(self) -> Path:
        """One file for each life of a node: 17 bytes a trace, see `acks`."""
        return self.directory / "acks"

    @property
    def shards_dir(self) -> Path:
        """Where the compactors write."""
        return self.config.state_dir / "shards"

    def erase(self, number: int) -> bool:
        """Erase a doomed subject, as an operator does beside everything that runs.

        False where the database was away; then it may be half done, and is to be repeated.
        """
        with contextlib.suppress(StoreError):
            erase_subject(
                self.catalog,
                self.keyring,
                tenant=TENANT,
                subject=f"{DOOMED_PREFIX}{number}",
                now_s=time.time(),
            )
            return True
        return False


def node_name(number: int) -> str:
    """What node `number` is enrolled as."""
    return f"node-{number}"


def node_config(config: Config, number: int) -> Config:
    """The configuration of a node: a directory of its own, everything else shared."""
    return config.model_copy(
        update={
            "state_dir": config.state_dir.parent / node_name(number),
            "serve": config.serve.model_copy(update={"node": node_name(number)}),
        }
    )


def log_dir(config: Config) -> Path:
    """Where the node of this configuration has its embedded log."""
    return config.log_path


@contextmanager
def open_site(
    directory: Path,
    plan: Plan,
    *,
    kafka: Kafka,
    topic: str,
    postgres: Postgres,
    catalog_url: str,
) -> Iterator[Site]:
    """Keys, enrolled nodes and a topic; nobody may have used `topic` or the database before."""
    config = Config.model_validate(_settings(directory, kafka, topic, catalog_url))
    replicas = len(kafka.nodes)
    create_topic(
        kafka.access,
        config.kafka.topic,
        partitions=plan.partitions,
        replicas=replicas,
        ttl_s=_TTL_S,
    )
    keyring = Keyring.open(config.keys_path, retention=config.retention, clock=time.time)
    catalog = Catalog.configured(config)
    site = Site(
        directory=directory,
        config=config,
        kafka=kafka,
        postgres=postgres,
        keyring=keyring,
        catalog=catalog,
    )
    try:
        publish_anchor(config.state_dir, ISSUER, keyring.issuer_public)
        for number in range(plan.nodes):
            name = node_name(number)
            signing = SigningKey.load_or_create(config.keys_path / f"node-{name}.key")
            enrol_node(catalog, name, signing.public, [TENANT], time.time())
        site.acks_dir.mkdir()
        yield site
    finally:
        catalog.close()
        keyring.close()


def _settings(directory: Path, kafka: Kafka, topic: str, catalog_url: str) -> Mapping[str, Any]:
    return {
        "state_dir": directory / "store",
        "keys_dir": directory / "keys",
        "catalog": {"url": catalog_url.replace("postgresql+psycopg:", "postgresql:")},
        "kafka": {
            "servers": list(kafka.access.servers),
            "topic": topic,
            "deadline_s": _DEADLINE_S,
            "delete_records": "compacted",
        },
        "log": {"bucket_s": 2},
        "retention": {"period_s": _PERIOD_S, "ttl_s": _TTL_S},
    }
