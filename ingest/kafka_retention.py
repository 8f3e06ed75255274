"""TopicRetention: how old a record gets on the brokers' disks, by what they are really set to."""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from draftkeep.ingest.kafka_client import KafkaAccess
from draftkeep.ingest.kafka_topic_state import broker_settings, topic_settings_of


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicRetention:
    """What decides how old a record on the brokers' disks can get.

    `check_ms` is the longest that any broker waits before it looks for expired segments.
    `retention_ms` is None where the topic keeps its records for ever.
    """

    retention_ms: int | None
    segment_ms: int
    check_ms: int
    delete_delay_ms: int
    append_time: bool
    deletes: bool
    tiered: bool

    @property
    def worst_case_age_s(self) -> float:
        """The greatest age of a record on a healthy broker, infinite where there is none.

        A segment goes as a whole once its newest record is `retention_ms` old, and takes records
        for up to `segment_ms`; then the broker has to look, and renames the file before it
        unlinks it. Without the broker's own timestamps one record from the future holds all.
        """
        if self.retention_ms is None or not self.append_time or not self.deletes or self.tiered:
            return math.inf
        parts_ms = (self.retention_ms, self.segment_ms, self.check_ms, self.delete_delay_ms)
        return sum(parts_ms) / 1000

    def problems(self, ttl_s: float) -> list[str]:
        """Why the topic cannot keep a deadline of `ttl_s`, one sentence each; empty if it can."""
        found = []
        if self.retention_ms is None:
            found.append("retention.ms is unlimited; set it below the deadline")
        if not self.append_time:
            found.append("message.timestamp.type is CreateTime; set it to LogAppendTime")
        if not self.deletes:
            found.append("cleanup.policy is not delete; set it to delete")
        if self.tiered:
            found.append("remote.storage.enable is true; tiered copies have their own deadline")
        if not found and self.worst_case_age_s > ttl_s:
            found.append(
                f"a record can get {self.worst_case_age_s:g} s old (retention.ms "
                f"{self.retention_ms} + segment.ms {self.segment_ms} + the brokers' check interval "
                f"{self.check_ms} + file.delete.delay.ms {self.delete_delay_ms}), more than the "
                f"deadline of {ttl_s:g} s; shorten retention.ms"
            )
        return found


def read_retention(access: KafkaAccess, topic_name: str) -> TopicRetention:
    """What the brokers really do with the topic. Raises StoreError where it is not there."""
    with access.admin() as admin:
        return retention_of(topic_settings_of(admin, topic_name), broker_settings(admin).values())


def retention_of(
    topic: Mapping[str, str], brokers: Collection[Mapping[str, str]]
) -> TopicRetention:
    """What a topic's settings and those of the brokers come to."""
    retention_ms = int(topic["retention.ms"])
    return TopicRetention(
        retention_ms=None if retention_ms < 0 else retention_ms,
        segment_ms=int(topic["segment.ms"]),
        # After a start the first look comes only when the initial delay is over.
        check_ms=max(
            max(
                int(broker["log.retention.check.interval.ms"]),
                int(broker.get("log.initial.task.delay.ms", 0)),
            )
            for broker in brokers
        ),
        delete_delay_ms=int(topic["file.delete.delay.ms"]),
        append_time=topic["message.timestamp.type"] == "LogAppendTime",
        deletes="delete" in topic["cleanup.policy"].split(","),
        tiered=topic.get("remote.storage.enable") == "true",
    )
