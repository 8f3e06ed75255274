"""The envelope, version 1: seal a body so that it needs two secrets to open.

A *node share* (32 random bytes per node, tenant and period, encapsulated to the period's public
key) and the *subject key* are mixed; losing either closes the trace for ever. With
lp(x) = 4-byte big-endian length, then x; HMAC and HKDF over SHA-256:

    info        "draftkeep/v1/share" || lp(suite id) || lp(tenant) || lp(period id) || lp(node)
    share id    SHA-256(encapsulation)[:16]
    PRK         HMAC(key = share, "draftkeep/v1/mix" || subject key)
    OKM         HKDF-Expand(PRK, "draftkeep/v1/trace" || trace id || SHA-256(header), 64)
                = content key (32) || commitment (32)
    ciphertext  AES-256-GCM(content key, nonce, body, associated data = header)
    signature   Ed25519 of the node over "draftkeep/v1/sig" ||
                SHA-256(lp(header) || nonce || ciphertext || commitment)

The suite id and the encoding of keys are in `draftkeep.policies.period_keys`.
"""

import hashlib
import hmac
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import lru_cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from draftkeep.errors import DraftkeepError, EnvelopeError, KeyDestroyedError
from draftkeep.ingest.header import HEADER_VERSION, Header
from draftkeep.ingest.record import (
    NONCE_BYTES,
    SealedTrace,
    misfit,
    share_id,
    signed_message,
    verify_signature,
)
from draftkeep.ingest.stages import each
from draftkeep.ingest.trace import Provenance
from draftkeep.policies import names, period_keys
from draftkeep.policies.keyring import JobKeys, NodeKeys
from draftkeep.policies.names import ID_BYTES, lp, mac, text
from draftkeep.policies.retention import Clock, PeriodRecord, effective_deadline, read_clock
from draftkeep.policies.signing import SigningKey
from draftkeep.policies.subject_rows import SubjectKey

__all__ = [
    "Opener",
    "SealedTrace",
    "Sealer",
    "content_key",
    "share_info",
    "signed_message",
    "verify_signature",
]


# What encapsulations are bound to is the same for all traces of a node and period, and no secret.
_INFOS = 1024


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class _Share:
    share: bytes
    encapsulation: bytes
    share_id: bytes
    end_s: int


class Sealer:
    """Seals bodies for one node. Thread-safe.

    Holds one node share per (tenant, period) and drops it at the first call after the period's
    end; an idle node calls `sweep`. A trace sealed after the end of its own period gets a share
    of its own, kept nowhere.
    """

    def __init__(
        self,
        keys: NodeKeys,
        node: str,
        signing: SigningKey,
        *,
        clock: Clock,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._keys = keys
        self._node = node
        self._signing = signing
        self._clock = clock
        self._random = random
        self._shares: dict[bytes, _Share] = {}
        self._mutex = threading.Lock()

    def seal(
        self, body: bytes, provenance: Provenance, *, prompt_tokens: int, positions: int
    ) -> SealedTrace:
        """Seal one body in the period that contains `provenance.created_s`.

        The subject's key is durable before anything is sealed under it. DeniedError where the
        period has no signed record, KeyDestroyedError where its deadline has passed: either way
        nothing was sealed and the trace is dropped.
        """
        record = self._keys.period_at(provenance.tenant, provenance.created_s)
        subject = self._keys.subject(provenance.tenant, provenance.subject, record.period_id)
        share = self._share_for(record)
        header = Header(
            version=HEADER_VERSION,
            trace_id=self._random(ID_BYTES),
            request_id=self._request_id(provenance),
            tenant=provenance.tenant,
            period_id=record.period_id,
            alias=subject.alias,
            subject_kind=subject.kind,
            share_id=share.share_id,
            target=provenance.target,
            tokenizer=provenance.tokenizer,
            node=self._node,
            created_s=provenance.created_s,
            expiry_s=record.destroy_at_s,
            consent=provenance.consent,
            policy_version=provenance.policy_version,
            origin=int(provenance.origin),
            parent_trace_id=None,
            domain=provenance.domain,
            prompt_tokens=prompt_tokens,
            positions=positions,
            body_bytes=len(body),
            ext=b"",
        )
        return self._close(header, body, share, subject)

    def held_out(self, provenance: Provenance) -> bool:
        """The trace's held-out bit, the same for all traces of a subject (`names.held_out`)."""
        lookup_key = self._keys.lookup_key(provenance.tenant)
        return names.held_out(lookup_key, provenance.subject, self._request_id(provenance))

    def sweep(self) -> None:
        """Forget the shares of ended periods and expired keys. An idle node calls this."""
        now_s = read_clock(self._clock)
        with self._mutex:
            self._drop_ended(now_s)
        self._keys.sweep()

    def _request_id(self, provenance: Provenance) -> bytes:
        return names.request_id(self._keys.lookup_key(provenance.tenant), provenance.response_id)

    def _close(
        self, header: Header, body: bytes, share: _Share, subject: SubjectKey
    ) -> SealedTrace:
        encoded = header.encode()
        key, commitment = content_key(share.share, subject.key, header.trace_id, encoded)
        nonce = self._random(NONCE_BYTES)
        ciphertext = AESGCM(key).encrypt(nonce, body, encoded)
        message = signed_message(encoded, nonce, ciphertext, commitment)
        return SealedTrace(
            header=encoded,
            nonce=nonce,
            ciphertext=ciphertext,
            commitment=commitment,
            signature=self._signing.sign(message),
            encapsulation=share.encapsulation,
        )

    def _share_for(self, record: PeriodRecord) -> _Share:
        now_s = read_clock(self._clock)
        with self._mutex:
            self._drop_ended(now_s)
            share = self._shares.get(record.period_id)
            if share is None:
                share = self._draw(record)
                if share.end_s > now_s:
                    self._shares[record.period_id] = share
            return share

    def _drop_ended(self, now_s: float) -> None:
        for period_id in [key for key, share in self._shares.items() if share.end_s <= now_s]:
            del self._shares[period_id]

    def _draw(self, record: PeriodRecord) -> _Share:
        share = self._random(period_keys.SHARE_BYTES)
        info = share_info(record.tenant, record.period_id, self._node)
        encapsulation = period_keys.seal_share(record.public_key, share, info)
        return _Share(
            share=share,
            encapsulation=encapsulation,
            share_id=share_id(encapsulation),
            end_s=self._keys.period_end_s(record),
        )


class Opener:
    """Opens sealed traces while their keys live. Thread-safe; keys are kept by `JobKeys` alone.

    `node_public` gives the signing key of an enrolled node by name, None for any other.
    """

    def __init__(
        self, keys: JobKeys, node_public: Callable[[str], bytes | None], *, clock: Clock
    ) -> None:
        self._keys = keys
        self._node_public = node_public
        self._clock = clock

    def open(self, sealed: SealedTrace) -> bytes:
        """The body.

        EnvelopeError where the trace is corrupt, forged, from a node that is not enrolled, or
        disagrees with its period's record. KeyDestroyedError where a key is gone or the deadline,
        min(header, period record), has passed by the clock: count it and go on.
        """
        return self._opened(self._checked(sealed))

    def open_all(self, sealed: Iterable[SealedTrace]) -> list[bytes | DraftkeepError]:
        """`open` of each, in order, or which of its two errors it raises; quicker than one by one.

        A few dozen at a time are best. Every key is asked for after all signatures were checked.
        """
        errors = (EnvelopeError, KeyDestroyedError)
        return each(self._opened, each(self._checked, sealed, errors), errors)

    def _checked(self, sealed: SealedTrace) -> SealedTrace:
        """What its node signed, and so may be opened."""
        header = sealed.parsed
        public = self._node_public(header.node)
        if public is None:
            raise EnvelopeError("sealed by a node that is not enrolled; enrol it or drop the trace")
        if not verify_signature(sealed, public):
            raise EnvelopeError("the node's signature does not fit the trace; drop it")
        if (found := misfit(sealed, header)) is not None:
            raise EnvelopeError(f"the header does not fit what it covers ({found}); drop the trace")
        return sealed

    def _opened(self, sealed: SealedTrace) -> bytes:
        header = sealed.parsed
        keys = self._keys.at(header.period_id)
        _check_record(header, keys.record, read_clock(self._clock))
        info = share_info(header.tenant, header.period_id, header.node)
        share, subject_key = keys.share(sealed.encapsulation, info), keys.subject_key(header.alias)
        key, commitment = content_key(share, subject_key, header.trace_id, sealed.header)
        if not hmac.compare_digest(commitment, sealed.commitment):
            raise EnvelopeError("the key commitment does not fit the trace; drop it")
        try:
            return AESGCM(key).decrypt(sealed.nonce, sealed.ciphertext, sealed.header)
        except InvalidTag:
            raise EnvelopeError("the body does not open under its key; drop the trace") from None


@lru_cache(maxsize=_INFOS)
def share_info(tenant: str, period_id: bytes, node: str) -> bytes:
    """What an encapsulation is bound to: suite, tenant, period and node."""
    fields = (period_keys.SUITE_ID, text(tenant), period_id, text(node))
    return b"draftkeep/v1/share" + b"".join(lp(field) for field in fields)


def content_key(
    share: bytes, subject_key: bytes, trace_id: bytes, header: bytes
) -> tuple[bytes, bytes]:
    """(content key, commitment), 32 bytes each, of one trace."""
    prk = mac(share, b"draftkeep/v1/mix" + subject_key)
    info = b"draftkeep/v1/trace" + trace_id + hashlib.sha256(header).digest()
    # HKDF-Expand, two blocks of which are exactly the two keys.
    key = mac(prk, info + b"\x01")
    return key, mac(prk, key + info + b"\x02")


def _check_record(header: Header, record: PeriodRecord, now_s: float) -> None:
    if header.tenant != record.tenant or header.created_s < record.start_s:
        raise EnvelopeError("the header does not fit its period's record; drop the trace")
    deadline_s = effective_deadline(header.expiry_s, record.destroy_at_s)
    if deadline_s <= now_s:
        raise KeyDestroyedError(f"the trace's deadline {deadline_s} has passed; skip it")
