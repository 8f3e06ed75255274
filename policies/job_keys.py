"""What a distillation job may do with the keyring: open what still has its keys."""

from pathlib import Path
from typing import Self

from draftkeep.errors import ConfigError, KeyDestroyedError
from draftkeep.policies import period_rows
from draftkeep.policies.kek import LocalKek
from draftkeep.policies.key_cache import KeyCache
from draftkeep.policies.keyring_db import KeyringDb
from draftkeep.policies.keyring_files import ISSUER_PUBLIC, PERIOD_KEK, SUBJECT_KEK, check_kek
from draftkeep.policies.retention import Clock, PeriodRecord, read_clock
from draftkeep.policies.subject_rows import SubjectRows


class JobKeys:
    """Both KEKs: private period keys and subject keys, while they live. Thread-safe.

    Keys are cached as in `NodeKeys`: min(60 s, time to the deadline), and none is returned that
    any process erased before the call. Writes nothing.
    """

    def __init__(
        self,
        db: KeyringDb,
        *,
        subject_kek: LocalKek,
        period_kek: LocalKek,
        issuer_public: bytes,
        clock: Clock,
    ) -> None:
        self._db = db
        self._rows = SubjectRows(db, subject_kek)
        self._period_kek = period_kek
        self._issuer_public = issuer_public
        self._clock = clock
        self._records: KeyCache[PeriodRecord] = KeyCache(clock=clock, erasures=db.erasures)
        self._privates: KeyCache[bytes] = KeyCache(clock=clock, erasures=db.erasures)
        self._subjects: KeyCache[bytes] = KeyCache(clock=clock, erasures=db.erasures)

    @classmethod
    def open(cls, directory: Path, *, clock: Clock) -> Self:
        """The job's view of an existing keyring; ConfigError where files are missing."""
        db = KeyringDb(directory, create=False)
        try:
            subject_kek = LocalKek.load(directory / SUBJECT_KEK)
            period_kek = LocalKek.load(directory / PERIOD_KEK)
            check_kek(db, SUBJECT_KEK, subject_kek)
            check_kek(db, PERIOD_KEK, period_kek)
            issuer_public = db.meta(ISSUER_PUBLIC)
            if issuer_public is None:
                raise ConfigError("keyring.db names no issuer; start the keyring once")
        except BaseException:
            db.close()
            raise
        return cls(
            db,
            subject_kek=subject_kek,
            period_kek=period_kek,
            issuer_public=issuer_public,
            clock=clock,
        )

    @property
    def issuer_public(self) -> bytes:
        """The Ed25519 public key that period records are checked with."""
        return self._issuer_public

    def period(self, period_id: bytes) -> PeriodRecord:
        """The verified record of a living period.

        KeyDestroyedError where it is gone, or past its deadline by the clock.
        """
        mark = self._records.sweep()
        record = self._records.get(period_id)
        if record is None:
            record = period_rows.by_id(self._db, period_id)
            if record is None:
                raise KeyDestroyedError("the period's key is destroyed; skip the trace")
            period_rows.verified(record, self._issuer_public)
            self._records.put(period_id, record, deadline_s=record.destroy_at_s, mark=mark)
        if record.destroy_at_s <= read_clock(self._clock):
            raise KeyDestroyedError(
                f"the period's deadline {record.destroy_at_s} has passed; skip the trace"
            )
        return record

    def period_private_key(self, period_id: bytes) -> bytes:
        """The period's private key, 96 bytes; KeyDestroyedError where gone or past its deadline."""
        record = self.period(period_id)
        mark = self._privates.sweep()
        key = self._privates.get(period_id)
        if key is None:
            key = period_rows.private_key(self._db, self._period_kek, record)
            if key is None:
                raise KeyDestroyedError("the period's key is destroyed; skip the trace")
            self._privates.put(period_id, key, deadline_s=record.destroy_at_s, mark=mark)
        return key

    def subject_key_for(self, alias: bytes, period_id: bytes) -> bytes:
        """The 32-byte key of the subject behind an alias in a period.

        KeyDestroyedError where subject or period is erased, or the deadline has passed.
        """
        record = self.period(period_id)
        mark = self._subjects.sweep()
        key = self._subjects.get((alias, period_id))
        if key is None:
            key = self._rows.by_alias(alias, period_id)
            if key is None:
                raise KeyDestroyedError("the subject's key is destroyed; skip the trace")
            self._subjects.put((alias, period_id), key, deadline_s=record.destroy_at_s, mark=mark)
        return key

    def sweep(self) -> None:
        """Forget expired keys. An idle process calls this now and then."""
        for cache in (self._records, self._privates, self._subjects):
            cache.sweep()

    def close(self) -> None:
        """Close the keyring's file."""
        self._db.close()
