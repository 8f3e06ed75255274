"""The issuer: the role that makes periods and signs their records."""

import os
from collections.abc import Callable
from dataclasses import replace

from draftkeep.config import RetentionConfig
from draftkeep.errors import KeyDestroyedError
from draftkeep.policies import period_keys, period_rows
from draftkeep.policies.kek import LocalKek
from draftkeep.policies.keyring_db import KeyringDb
from draftkeep.policies.names import ID_BYTES
from draftkeep.policies.retention import Clock, PeriodRecord, period_start, read_clock
from draftkeep.policies.signing import SigningKey


class Issuer:
    """Holds the issuer's signing key and the period KEK, and needs nothing else."""

    def __init__(
        self,
        db: KeyringDb,
        *,
        key: SigningKey,
        period_kek: LocalKek,
        retention: RetentionConfig,
        clock: Clock,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._db = db
        self._key = key
        self._kek = period_kek
        self._retention = retention
        self._clock = clock
        self._random = random

    @property
    def public(self) -> bytes:
        """The Ed25519 public key that period records are checked with."""
        return self._key.public

    def ensure_period(self, tenant: str, at_s: float) -> PeriodRecord:
        """The signed record of the tenant's period that contains `at_s`, made where missing.

        All processes get the same one, and it is durable before this returns. KeyDestroyedError
        for a period whose deadline has passed: its key is not made again.
        """
        start_s = period_start(at_s, self._retention.period_s)
        record = period_rows.by_start(self._db, tenant, start_s)
        if record is None:
            record = self._make(tenant, start_s)
        if record.destroy_at_s <= read_clock(self._clock):
            raise KeyDestroyedError(
                f"the period that began at {start_s} ended its life at {record.destroy_at_s}; "
                "nothing can be sealed in it any more"
            )
        return record

    def redate(self) -> int:
        """Bring forward deadlines that the configured ttl no longer allows; how many periods.

        A lengthened ttl changes nothing here: it counts for new periods.
        """
        ttl_s = self._retention.ttl_s
        late = [
            record
            for record in period_rows.all_records(self._db)
            if record.destroy_at_s > record.start_s + ttl_s
        ]
        if not late:
            return 0
        # As an erasure, because caches hold the old deadlines.
        with self._db.erase() as connection:
            for record in late:
                dated = self._sign(replace(record, destroy_at_s=record.start_s + ttl_s))
                connection.execute(
                    "UPDATE periods SET destroy_at_s = ?, signature = ? WHERE period_id = ?",
                    (dated.destroy_at_s, dated.signature, dated.period_id),
                )
            connection.execute(
                "UPDATE subjects SET last_destroy_at_s = min(last_destroy_at_s, last_start_s + ?)",
                (ttl_s,),
            )
        return len(late)

    def _make(self, tenant: str, start_s: int) -> PeriodRecord:
        deadline_s = start_s + self._retention.ttl_s
        if deadline_s <= read_clock(self._clock):
            raise KeyDestroyedError(
                f"no period that began at {start_s} can live past {deadline_s}, and that has "
                "passed; nothing can be sealed in it"
            )
        private = period_keys.generate_private()
        record = self._sign(
            PeriodRecord(
                tenant=tenant,
                period_id=self._random(ID_BYTES),
                start_s=start_s,
                destroy_at_s=deadline_s,
                public_key=period_keys.public_of(private),
            )
        )
        self._insert(record, private)
        stored = period_rows.by_start(self._db, tenant, start_s)
        if stored is None:
            raise KeyDestroyedError("the period was destroyed while it was being made")
        return stored

    def _insert(self, record: PeriodRecord, private: bytes) -> None:
        wrapped = self._kek.wrap(private, period_rows.wrap_context(record.tenant, record.period_id))
        with self._db.write() as connection:
            # Another process may have been first: its row stands and this key is forgotten.
            connection.execute(
                "INSERT OR IGNORE INTO periods VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    record.period_id,
                    record.tenant,
                    record.start_s,
                    record.destroy_at_s,
                    record.public_key,
                    record.signature,
                    wrapped,
                ),
            )

    def _sign(self, record: PeriodRecord) -> PeriodRecord:
        return replace(record, signature=self._key.sign(record.signed_bytes()))
