"""What a distillation job may do with the keyring: open what still has its keys."""

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any, Self

from draftkeep.errors import ConfigError, KeyDestroyedError
from draftkeep.policies import period_keys, period_rows
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
        # Of every kind, so that one look at the keyring's erasures is enough for all of them.
        self._kept: KeyCache[Any] = KeyCache(clock=clock, erasures=db.erasures)

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

    def at(self, period_id: bytes) -> "PeriodKeys":
        """The keys of a living period, none of which was erased before this call.

        Raises as `period` does.
        """
        mark = self._kept.sweep()
        record: PeriodRecord | None = self._kept.peek(period_id)
        if record is None:
            record = period_rows.by_id(self._db, period_id)
            if record is None:
                raise KeyDestroyedError("the period's key is destroyed; skip the trace")
            period_rows.verified(record, self._issuer_public)
            self._kept.put(period_id, record, deadline_s=record.destroy_at_s, mark=mark)
        if record.destroy_at_s <= read_clock(self._clock):
            raise KeyDestroyedError(
                f"the period's deadline {record.destroy_at_s} has passed; skip the trace"
            )
        return PeriodKeys(self, record, mark)

    def period(self, period_id: bytes) -> PeriodRecord:
        """The verified record of a living period.

        KeyDestroyedError where it is gone, or past its deadline by the clock.
        """
        return self.at(period_id).record

    def period_private_key(self, period_id: bytes) -> bytes:
        """The period's private key, 96 bytes; KeyDestroyedError where gone or past its deadline."""
        return self.at(period_id).private_key()

    def subject_key_for(self, alias: bytes, period_id: bytes) -> bytes:
        """The 32-byte key of the subject behind an alias in a period.

        KeyDestroyedError where subject or period is erased, or the deadline has passed.
        """
        return self.at(period_id).subject_key(alias)

    def sweep(self) -> None:
        """Forget expired keys. An idle process calls this now and then."""
        self._kept.sweep()

    def close(self) -> None:
        """Close the keyring's file."""
        self._db.close()


class PeriodKeys:
    """What opens the traces of one period, for the moment: ask `JobKeys.at` for every trace.

    `record` is the verified record of the period, which was alive then. Every method raises
    KeyDestroyedError where its key is gone.
    """

    __slots__ = ("_keys", "_mark", "record")

    def __init__(self, keys: JobKeys, record: PeriodRecord, mark: int) -> None:
        self._keys = keys
        self._mark = mark
        self.record = record

    def private_key(self) -> bytes:
        """The period's private key, 96 bytes."""
        keys = self._keys
        return self._kept(
            "private", lambda: period_rows.private_key(keys._db, keys._period_kek, self.record)
        )

    def share(self, encapsulation: bytes, info: bytes) -> bytes:
        """The node share in an encapsulation; EnvelopeError where they do not belong together."""
        return self._kept(
            (encapsulation, info),
            lambda: period_keys.open_share(self.private_key(), encapsulation, info),
        )

    def subject_key(self, alias: bytes) -> bytes:
        """The 32-byte key of the subject behind an alias."""
        return self._kept(
            alias, lambda: self._keys._rows.by_alias(alias, self.record.period_id), "subject"
        )

    def _kept(
        self, name: Hashable, load: Callable[[], bytes | None], owner: str = "period"
    ) -> bytes:
        kept, place = self._keys._kept, (self.record.period_id, name)
        key: bytes | None = kept.peek(place)
        if key is None:
            key = load()
            if key is None:
                raise KeyDestroyedError(f"the {owner}'s key is destroyed; skip the trace")
            kept.put(place, key, deadline_s=self.record.destroy_at_s, mark=self._mark)
        return key
