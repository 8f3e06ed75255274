"""A sealer that makes its periods known to the catalog before it seals under them.

The compactor holds no key and admits only headers that match a published, signed period record.
"""

from collections.abc import Callable

from draftkeep.ingest.envelope import SealedTrace, Sealer
from draftkeep.ingest.trace import Provenance
from draftkeep.policies.keyring import NodeKeys
from draftkeep.policies.signing import SigningKey
from draftkeep.store.catalog import Catalog
from draftkeep.store.periods import publish_period


class PublishingSealer(Sealer):
    """A `Sealer` over a catalog. Thread-safe; one extra commit for each period."""

    def __init__(
        self,
        keys: NodeKeys,
        node: str,
        signing: SigningKey,
        *,
        catalog: Catalog,
        clock: Callable[[], float],
    ) -> None:
        super().__init__(keys, node, signing, clock=clock)
        self._node_keys = keys
        self._catalog = catalog
        self._published: set[tuple[bytes, int]] = set()

    def seal(
        self, body: bytes, provenance: Provenance, *, prompt_tokens: int, positions: int
    ) -> SealedTrace:
        """Publish the period's record if this process has not, then seal."""
        record = self._node_keys.period_at(provenance.tenant, provenance.created_s)
        mark = (record.period_id, record.destroy_at_s)
        if mark not in self._published:
            publish_period(self._catalog, record)
            self._published.add(mark)
        return super().seal(body, provenance, prompt_tokens=prompt_tokens, positions=positions)
