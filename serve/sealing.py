"""A sealer that makes its periods known to the catalog before it seals under them, and that seals
nothing from before an erasure.

The compactor holds no key and admits only headers that match a published, signed period record.
"""

import os
from collections.abc import Callable

from draftkeep.errors import KeyDestroyedError
from draftkeep.ingest.envelope import SealedTrace, Sealer
from draftkeep.ingest.trace import Provenance
from draftkeep.policies.keyring import NodeKeys
from draftkeep.policies.names import lp, mac, text
from draftkeep.policies.signing import SigningKey
from draftkeep.store.catalog import Catalog
from draftkeep.store.periods import publish_period

# Longer than any request runs and any trace waits.
_REMEMBER_ERASURES_S = 86_400


class PublishingSealer(Sealer):
    """A `Sealer` over a catalog. Thread-safe; one extra commit for each period.

    Erasing a subject destroys the key, but the subject's next request gets a fresh one, and so
    would a trace that was still waiting here. `forget` refuses those.
    """

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
        self._now_s = clock
        self._published: set[tuple[bytes, int]] = set()
        self._salt = os.urandom(32)
        self._erased: dict[bytes, float] = {}

    def seal(
        self, body: bytes, provenance: Provenance, *, prompt_tokens: int, positions: int
    ) -> SealedTrace:
        """Publish the period's record if this process has not, then seal.

        Raises KeyDestroyedError also where the request came before its subject's erasure.
        """
        record = self._node_keys.period_at(provenance.tenant, provenance.created_s)
        mark = (record.period_id, record.destroy_at_s)
        if mark not in self._published:
            publish_period(self._catalog, record)
            self._published.add(mark)
        sealed = super().seal(body, provenance, prompt_tokens=prompt_tokens, positions=positions)
        # Last: whoever marks an erasure after this destroys the key that was used here.
        self._refuse_erased(provenance)
        return sealed

    def forget(self, tenant: str, subject: str) -> None:
        """Refuse what this subject has sent so far; call it before the key is destroyed."""
        self._erased[self._mark(tenant, subject)] = self._now_s()

    def sweep(self) -> None:
        """Forget ended periods and long past erasures as well."""
        super().sweep()
        horizon_s = self._now_s() - _REMEMBER_ERASURES_S
        for mark in [mark for mark, at_s in list(self._erased.items()) if at_s < horizon_s]:
            del self._erased[mark]

    def _refuse_erased(self, provenance: Provenance) -> None:
        if provenance.subject is None:
            return
        erased_s = self._erased.get(self._mark(provenance.tenant, provenance.subject))
        if erased_s is not None and provenance.created_s <= erased_s:
            raise KeyDestroyedError("the subject was erased after this request; drop the trace")

    def _mark(self, tenant: str, subject: str) -> bytes:
        # Salted, so that this memory holds no name.
        return mac(self._salt, lp(text(tenant)) + lp(text(subject)))
