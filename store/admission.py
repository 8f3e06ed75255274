"""Admission: whether a record from a log may become a row of a shard. It needs no key.

What it checks, in this order: the record's and header's format; whether the header's own deadline
has passed; tombstones; the node (enrolled, not revoked, allowed for the tenant) and its signature;
the share id against the encapsulation, and the body's length; the header against the issuer's
signed period record.
"""

import hashlib
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from sqlalchemy.engine import Connection

from draftkeep.config import MIN_PERIODS_PER_TTL
from draftkeep.errors import EnvelopeError
from draftkeep.ingest.header import Header
from draftkeep.ingest.log import LogRecord
from draftkeep.ingest.record import SealedTrace, misfit, read_record, verify_signature
from draftkeep.policies.retention import effective_deadline
from draftkeep.store.nodes import Node, load_nodes
from draftkeep.store.periods import PublishedPeriod, load_periods
from draftkeep.store.tombstones import Tombstones, load_tombstones


class Refusal(StrEnum):
    """Why a record was not stored. The first two are normal and only counted."""

    EXPIRED = "expired"
    ERASED = "erased"
    UNREADABLE = "unreadable"
    UNKNOWN_NODE = "unknown_node"
    REVOKED_NODE = "revoked_node"
    TENANT_NOT_ALLOWED = "tenant_not_allowed"
    BAD_SIGNATURE = "bad_signature"
    SHARE_MISMATCH = "share_mismatch"
    LENGTH_MISMATCH = "length_mismatch"
    UNKNOWN_PERIOD = "unknown_period"
    UNTRUSTED_PERIOD = "untrusted_period"
    PERIOD_MISMATCH = "period_mismatch"
    EXPIRY_MISMATCH = "expiry_mismatch"
    CREATED_OUTSIDE_PERIOD = "created_outside_period"
    CONFLICT = "conflict"


COUNTED_ONLY = frozenset({Refusal.EXPIRED, Refusal.ERASED})

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A record that decodes. `digest` is the SHA-256 of its bytes in the log."""

    offset: int
    sealed: SealedTrace
    header: Header
    digest: bytes

    @property
    def key(self) -> tuple[int, bytes, str]:
        """What makes a trace the same trace: expiry bucket, trace id, node.

        The bucket is the expiry itself: all traces of a tenant's period share it.
        """
        return self.header.expiry_s, self.header.trace_id, self.header.node


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """A record that is not stored, and why. `data` are its bytes; `detail` is never content."""

    offset: int
    data: bytes
    header: Header | None
    reason: Refusal
    detail: str


def parse(records: list[LogRecord]) -> tuple[list[Candidate], list[Refused]]:
    """Decode records; what does not decode, an unknown version included, is refused.

    Takes the records: the list is empty afterwards.
    """
    candidates, refused, faults = [], [], set()
    records.reverse()
    while records:
        # Let go before the next is decoded, so that a batch is not held twice, as it lay in the
        # log and in pieces.
        source = records.pop()
        try:
            sealed, header = read_record(source.data)
        except Exception as error:
            # One record must not stop the line, whatever the decoder fails to foresee.
            detail = str(error)
            if not isinstance(error, EnvelopeError):
                # Its words may hold content.
                detail = f"the decoder failed ({type(error).__name__})"
                faults.add(type(error).__name__)
            refused.append(
                Refused(
                    offset=source.offset,
                    data=source.data,
                    header=None,
                    reason=Refusal.UNREADABLE,
                    detail=detail,
                )
            )
            continue
        digest = hashlib.sha256(source.data).digest()
        candidates.append(
            Candidate(offset=source.offset, sealed=sealed, header=header, digest=digest)
        )
    if faults:
        _log.error(
            "the decoder failed on records (%s), which are kept as dead letters; report it",
            ", ".join(sorted(faults)),
        )
    return candidates, refused


def judge_again(connection: Connection, refused: Iterable[Refused]) -> tuple[Refused, ...]:
    """The same refusals, with those as ERASED that were erased after they were judged.

    For the transaction that keeps them: an erasure that committed before it has looked for dead
    letters already, and one that comes after it finds these.
    """
    found = tuple(refused)
    kept = [item.header for item in found if item.header and item.reason not in COUNTED_ONLY]
    if not kept:
        return found
    stones = load_tombstones(connection, kept)
    return tuple(
        replace(item, reason=Refusal.ERASED) if item.header and stones.cover(item.header) else item
        for item in found
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The facts one batch is judged by, read from the catalog in one snapshot.

    `trusted` are the periods whose record carries the issuer's signature. How long
    a period may be is bounded by the ttl, which the configuration holds to at least
    `MIN_PERIODS_PER_TTL` of them: today's length would refuse honest traces that were sealed
    yesterday under a longer one.
    """

    nodes: dict[str, Node]
    periods: dict[bytes, PublishedPeriod]
    trusted: frozenset[bytes]
    tombstones: Tombstones
    now_s: float

    @classmethod
    def load(
        cls,
        connection: Connection,
        candidates: Sequence[Candidate],
        *,
        issuer_public: bytes,
        now_s: float,
    ) -> "Admission":
        """Read what judging `candidates` needs."""
        headers = [candidate.header for candidate in candidates]
        periods = load_periods(connection, {header.period_id for header in headers})
        return cls(
            nodes=load_nodes(connection),
            periods=periods,
            trusted=frozenset(
                period_id
                for period_id, published in periods.items()
                if published.record.verify(issuer_public)
            ),
            tombstones=load_tombstones(connection, headers),
            now_s=now_s,
        )

    def judge(self, candidate: Candidate) -> Refusal | None:
        """Why this record may not be stored; None when it may."""
        header = candidate.header
        if header.expiry_s <= self.now_s:
            return Refusal.EXPIRED
        # Before what makes a dead letter: nothing of an erased subject is kept, in no table.
        if self.tombstones.cover(header):
            return Refusal.ERASED
        return self._node(candidate) or self._period(header)

    def _node(self, candidate: Candidate) -> Refusal | None:
        header, sealed = candidate.header, candidate.sealed
        node = self.nodes.get(header.node)
        if node is None:
            return Refusal.UNKNOWN_NODE
        if node.revoked_s is not None:
            return Refusal.REVOKED_NODE
        if header.tenant not in node.tenants:
            return Refusal.TENANT_NOT_ALLOWED
        if not verify_signature(sealed, node.public_key):
            return Refusal.BAD_SIGNATURE
        found = misfit(sealed, header)
        return None if found is None else Refusal(found)

    def _period(self, header: Header) -> Refusal | None:
        published = self.periods.get(header.period_id)
        if published is None:
            return Refusal.UNKNOWN_PERIOD
        record = published.record
        if header.period_id not in self.trusted:
            return Refusal.UNTRUSTED_PERIOD
        if record.tenant != header.tenant:
            return Refusal.PERIOD_MISMATCH
        if header.expiry_s not in (published.issued_expiry_s, record.destroy_at_s):
            return Refusal.EXPIRY_MISMATCH
        period_s = (published.issued_expiry_s - record.start_s) // MIN_PERIODS_PER_TTL
        if not record.start_s <= header.created_s < record.start_s + period_s:
            return Refusal.CREATED_OUTSIDE_PERIOD
        if effective_deadline(header.expiry_s, record.destroy_at_s) <= self.now_s:
            return Refusal.EXPIRED
        return None
