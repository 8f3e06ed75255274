"""A trace on its way: from the engine's hands to an acknowledged, sealed record in a log.

Start at `trace` (the noun), then `codec` (body bytes), `header` and `envelope` (the seal), `log`
(the contract of a log) with `sqlite_log` and `kafka_log`, and `emitter` (what a node calls).
With Kafka `forwarder` moves a node's log into the topic, and `kafka_group` shares its partitions.
"""
