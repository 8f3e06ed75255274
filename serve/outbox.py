"""Outbox: the way a trace leaves a node, from the emitter's queue to the embedded log."""

from collections.abc import Callable

from draftkeep.config import Config
from draftkeep.ingest.codec import encode_body
from draftkeep.ingest.emitter import Emitter
from draftkeep.ingest.sqlite_log import SqliteLog
from draftkeep.ingest.tables import RemapTable
from draftkeep.policies.keyring import Keyring
from draftkeep.policies.signing import SigningKey
from draftkeep.serve.sealing import PublishingSealer
from draftkeep.store.anchors import ISSUER, publish_anchor
from draftkeep.store.catalog import Catalog
from draftkeep.store.nodes import enrol_node


class Outbox:
    """The node's log with its emitter and sealer. `close` it before keyring and catalog."""

    def __init__(self, log: SqliteLog, sealer: PublishingSealer, emitter: Emitter) -> None:
        self.emitter = emitter
        self.sealer = sealer
        self._log = log

    @classmethod
    def build(
        cls,
        config: Config,
        *,
        keyring: Keyring,
        catalog: Catalog,
        clock: Callable[[], float],
        on_drop: Callable[[str], None],
    ) -> "Outbox":
        """Publish the issuer's key, enrol the node, open the log. `on_drop` is the emitter's.

        Raises what any of these raises; nothing is left open then.
        """
        publish_anchor(config.state_dir, ISSUER, keyring.issuer_public)
        name = config.serve.node
        signing = SigningKey.load_or_create(config.keys_path / f"node-{name}.key")
        tenants = [tenant.name for tenant in config.tenants]
        enrol_node(catalog, name, signing.public, tenants, clock())
        log = SqliteLog(
            config.state_dir / "log" / "traces",
            cap_bytes=config.log.cap_bytes,
            bucket_s=config.log.bucket_s,
            clock=clock,
        )
        sealer = PublishingSealer(keyring.node_keys(), name, signing, catalog=catalog, clock=clock)
        table = RemapTable.identity()
        emitter = Emitter(
            sealer,
            log,
            encode=lambda trace: encode_body(trace, table),
            queue_traces=config.capture.queue_traces,
            on_drop=on_drop,
        )
        return cls(log, sealer, emitter)

    def close(self, timeout_s: float) -> None:
        """Deliver what waits, drop what is left, and close the log, all within `timeout_s`."""
        self.emitter.close(0.8 * timeout_s)
        self._log.close(timeout_s=0.1 * timeout_s)
        # An append that hung has failed by now, and its traces count as dropped.
        self.emitter.close(0.1 * timeout_s)
