"""What a serving node may do with the keyring: everything sealing needs, nothing that opens."""

from pathlib import Path
from typing import Self

from draftkeep.config import RetentionConfig
from draftkeep.errors import ConfigError, DeniedError, KeyDestroyedError
from draftkeep.policies import names, period_rows
from draftkeep.policies.issuer import Issuer
from draftkeep.policies.kek import LocalKek
from draftkeep.policies.key_cache import KeyCache
from draftkeep.policies.keyring_db import KeyringDb
from draftkeep.policies.keyring_files import ISSUER_PUBLIC, SUBJECT_KEK, check_kek
from draftkeep.policies.retention import Clock, PeriodRecord, period_start, read_clock
from draftkeep.policies.subject_rows import SubjectKey, SubjectKind, SubjectRows


class NodeKeys:
    """Subject and lookup keys, and the public halves of periods. Thread-safe.

    A key for an already used (subject, period) comes from memory, where it lives
    min(60 s, time to its deadline). Every call first asks the keyring's erasure counter, so a key
    that any process erased before the call is never returned; a seal under way while a key is
    erased may finish, and its trace opens nowhere. Python cannot overwrite what it frees.
    """

    def __init__(
        self,
        db: KeyringDb,
        *,
        subject_kek: LocalKek,
        issuer_public: bytes,
        retention: RetentionConfig,
        clock: Clock,
        issuer: Issuer | None = None,
    ) -> None:
        self._db = db
        self._rows = SubjectRows(db, subject_kek)
        self._issuer = issuer
        self._issuer_public = issuer_public
        self._period_s = retention.period_s
        self._clock = clock
        self._records: KeyCache[PeriodRecord] = KeyCache(clock=clock, erasures=db.erasures)
        self._lookups: KeyCache[bytes] = KeyCache(clock=clock, erasures=db.erasures)
        self._subjects: KeyCache[SubjectKey] = KeyCache(clock=clock, erasures=db.erasures)

    @classmethod
    def open(cls, directory: Path, *, retention: RetentionConfig, clock: Clock) -> Self:
        """The node's view of an existing keyring; reads subject.kek and no other secret file.

        Periods must be made by the keyring's own process. ConfigError where there is no keyring.
        """
        db = KeyringDb(directory, create=False)
        try:
            kek = LocalKek.load(directory / SUBJECT_KEK)
            check_kek(db, SUBJECT_KEK, kek)
            issuer_public = db.meta(ISSUER_PUBLIC)
            if issuer_public is None:
                raise ConfigError("keyring.db names no issuer; start the keyring once")
        except BaseException:
            db.close()
            raise
        return cls(
            db, subject_kek=kek, issuer_public=issuer_public, retention=retention, clock=clock
        )

    @property
    def issuer_public(self) -> bytes:
        """The Ed25519 public key that period records are checked with."""
        return self._issuer_public

    def period_at(self, tenant: str, at_s: float) -> PeriodRecord:
        """The verified record of the tenant's period that contains `at_s`.

        Made on the spot where this process is also the issuer; else DeniedError when there is
        none. KeyDestroyedError when its deadline has passed.
        """
        start_s = period_start(at_s, self._period_s)
        mark = self._records.sweep()
        record = self._records.get((tenant, start_s))
        if record is None:
            record = period_rows.verified(self._record(tenant, start_s), self._issuer_public)
            self._records.put((tenant, start_s), record, deadline_s=record.destroy_at_s, mark=mark)
        self._refuse_past(record)
        return record

    def period_end_s(self, record: PeriodRecord) -> int:
        """When the period ends, after which its node share is forgotten. Unix seconds."""
        return record.start_s + self._period_s

    def lookup_key(self, tenant: str) -> bytes:
        """The tenant's 32-byte lookup key, made where missing; durable before this returns."""
        mark = self._lookups.sweep()
        key = self._lookups.get(tenant)
        if key is None:
            key = self._rows.lookup_key(tenant, create=True)
            if key is None:
                raise KeyDestroyedError("the tenant's lookup key was destroyed")
            self._lookups.put(tenant, key, deadline_s=float("inf"), mark=mark)
        return key

    def subject(self, tenant: str, subject: str | None, period_id: bytes) -> SubjectKey:
        """The key and alias of a subject (None: the anonymous callers) in one of the periods.

        Insert-or-read: all nodes adopt one stored key. On first use in a period the key, the alias
        and the subject's last use are durable before this returns; later uses write nothing.
        KeyDestroyedError where the period is gone or past its deadline.
        """
        kind = SubjectKind.ANONYMOUS if subject is None else SubjectKind.NAMED
        mark = self._subjects.sweep()
        tag = period_id if subject is None else names.subject_tag(self.lookup_key(tenant), subject)
        cached = self._subjects.get((tenant, kind, tag, period_id))
        if cached is not None:
            return cached
        record = period_rows.by_id(self._db, period_id)
        if record is None or record.tenant != tenant:
            raise KeyDestroyedError(
                "the tenant has no such period; it was destroyed, or never made: capture is dropped"
            )
        self._refuse_past(record)
        found = self._known(record, kind, tag) or self._rows.first_use(record, kind, tag)
        self._subjects.put(
            (tenant, kind, tag, period_id), found, deadline_s=record.destroy_at_s, mark=mark
        )
        return found

    def sweep(self) -> None:
        """Forget expired keys. An idle process calls this now and then."""
        for cache in (self._records, self._lookups, self._subjects):
            cache.sweep()

    def close(self) -> None:
        """Close the keyring's file."""
        self._db.close()

    def _record(self, tenant: str, start_s: int) -> PeriodRecord:
        if self._issuer is not None:
            return self._issuer.ensure_period(tenant, start_s)
        record = period_rows.by_start(self._db, tenant, start_s)
        if record is None:
            raise DeniedError(
                f"no signed period begins at {start_s} for this tenant; capture is dropped until "
                "the keyring's process makes one"
            )
        return record

    def _known(self, record: PeriodRecord, kind: SubjectKind, tag: bytes) -> SubjectKey | None:
        found = self._rows.find(record.tenant, kind, tag)
        if found is None:
            return None
        alias = names.alias(found[1], record.tenant, record.period_id)
        if not self._rows.used_in(alias, record.period_id):
            return None
        return SubjectKey(key=found[1], alias=alias, kind=int(kind))

    def _refuse_past(self, record: PeriodRecord) -> None:
        if record.destroy_at_s <= read_clock(self._clock):
            raise KeyDestroyedError(
                f"the period's keys lived until {record.destroy_at_s}; nothing can be sealed in it"
            )
