"""A subject is erased: `draftkeep compact` empties the topic and keeps everybody else's traces."""

import time
from pathlib import Path

from draftkeep.cli.auditing import ask
from draftkeep.cli.compacting import compact_once
from draftkeep.config import Config, KafkaConfig
from draftkeep.ingest.kafka_log import KafkaLog
from draftkeep.ingest.kafka_topic import create_topic
from draftkeep.ingest.record import encode_record
from draftkeep.store.anchors import ISSUER, publish_anchor
from draftkeep.store.audit_views import REPORTS
from draftkeep.store.erasure import erase_subject
from tests.services.kafka import Kafka
from tests.store.conftest import ids, make_world


def test_an_erasure_empties_the_topic(
    kafka_broker: Kafka, kafka_topic: str, tmp_path: Path
) -> None:
    create_topic(kafka_broker.access, kafka_topic, partitions=1, replicas=1, ttl_s=86_400)
    kafka = KafkaConfig(servers=kafka_broker.access.servers, topic=kafka_topic, deadline_s=10)
    config = Config(state_dir=tmp_path, kafka=kafka)
    world = make_world(tmp_path, f"sqlite:///{tmp_path / 'catalog.db'}")
    world.clock.now_s = time.time()
    publish_anchor(tmp_path, ISSUER, world.keyring.issuer_public)
    log = KafkaLog(kafka_broker.access, kafka_topic)
    before, innocent, later = world.seal(subject="ann"), world.seal(), world.seal()
    log.append([encode_record(item) for item in (before, innocent)])
    erase_subject(world.catalog, world.keyring, tenant="acme", subject="ann", now_s=time.time())
    done = compact_once(config)
    assert (done["stored"], done["log_deletions"]) == (1, 1)
    assert log.bounds() == (2, 2)
    log.append([encode_record(later)])
    assert compact_once(config)["log_deletions"] == 0
    # Of somebody who came after the erasure nothing is owed.
    assert log.bounds() == (2, 3)
    assert ids(world.stored()) == sorted([innocent.parsed.trace_id, later.parsed.trace_id])
    report = ask(config, REPORTS["log_deletions"])
    (line,) = [dict(zip(report.columns, row, strict=True)) for row in report.rows]
    assert (line["tenant"], line["state"], line["deleted"]) == ("acme", "deleted", 1)
    log.close()
    world.close()
