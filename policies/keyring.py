"""The keyring: every key that a deadline or an erasure destroys, and the acts that destroy them.

Files in the keys directory: `keyring.db` (rows, wrapped), `period.kek` and `subject.kek` (what
wraps them), `issuer.key` (signs period records), `keyring.lock` (taken by every writer). Three
roles use them, each with the secrets it needs and no others:

    Issuer     issuer.key, period.kek     makes and signs periods
    NodeKeys   subject.kek                seals
    JobKeys    subject.kek, period.kek    opens

`Keyring` plays all of them in one process and is the only one that destroys. Losing the keyring
costs captured traces and nothing else.
"""

from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Self

from draftkeep.config import RetentionConfig
from draftkeep.errors import ConflictError, StoreError
from draftkeep.policies import names, period_rows
from draftkeep.policies.issuer import Issuer
from draftkeep.policies.job_keys import JobKeys
from draftkeep.policies.kek import LocalKek
from draftkeep.policies.keyring_db import KeyringDb
from draftkeep.policies.keyring_files import (
    ISSUER_KEY,
    ISSUER_PUBLIC,
    PERIOD_KEK,
    SUBJECT_KEK,
    claim_kek,
)
from draftkeep.policies.node_keys import NodeKeys
from draftkeep.policies.retention import Clock, PeriodRecord
from draftkeep.policies.signing import SigningKey
from draftkeep.policies.subject_rows import (
    Alias,
    SubjectKey,
    SubjectKind,
    SubjectRows,
    SubjectTrail,
)

__all__ = [
    "Alias",
    "Issuer",
    "JobKeys",
    "Keyring",
    "NodeKeys",
    "SubjectKey",
    "SubjectKind",
    "SubjectTrail",
]

# Rows that one commit deletes: what it takes is what a seal may have to wait.
_CHUNK = 5000
_EXPIRED_ALIASES = (
    "(period_id, alias) IN (SELECT period_id, alias FROM aliases WHERE period_id IN "
    "(SELECT period_id FROM periods WHERE destroy_at_s <= ?)"
)
_EXPIRED_SUBJECTS = "subject_id IN (SELECT subject_id FROM subjects WHERE last_destroy_at_s <= ?"


class Keyring:
    """All roles over one keys directory. Any number of processes may open it at once.

    `node_keys()` and `job_keys()` are the views to hand to a sealer and an opener. Every insert is
    durable before the call that made it returns; a process killed at any moment leaves a usable
    keyring.
    """

    def __init__(
        self,
        db: KeyringDb,
        *,
        issuer_key: SigningKey,
        period_kek: LocalKek,
        subject_kek: LocalKek,
        retention: RetentionConfig,
        clock: Clock,
    ) -> None:
        self._db = db
        self._rows = SubjectRows(db, subject_kek)
        self._issuer = Issuer(
            db, key=issuer_key, period_kek=period_kek, retention=retention, clock=clock
        )
        self._node = NodeKeys(
            db,
            subject_kek=subject_kek,
            issuer_public=issuer_key.public,
            retention=retention,
            clock=clock,
            issuer=self._issuer,
        )
        self._job = JobKeys(
            db,
            subject_kek=subject_kek,
            period_kek=period_kek,
            issuer_public=issuer_key.public,
            clock=clock,
        )

    @classmethod
    def open(cls, directory: Path, *, retention: RetentionConfig, clock: Clock) -> Self:
        """Open the keyring in `directory`, making its files where there are none.

        Finishes what a killed erasure left in the write-ahead log, and brings deadlines forward
        where `retention` has a shorter ttl than before. StoreError where the files do not belong
        together.
        """
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        issuer_key = SigningKey.load_or_create(directory / ISSUER_KEY)
        period_kek = LocalKek.load_or_create(directory / PERIOD_KEK)
        subject_kek = LocalKek.load_or_create(directory / SUBJECT_KEK)
        db = KeyringDb(directory, create=True)
        try:
            claim_kek(db, PERIOD_KEK, period_kek)
            claim_kek(db, SUBJECT_KEK, subject_kek)
            if db.claim(ISSUER_PUBLIC, issuer_key.public) != issuer_key.public:
                raise StoreError(
                    "issuer.key is not the one that keyring.db was made with; restore the file"
                )
            # A reader in the way is no reason to stop: the next erasure tries again.
            with suppress(StoreError):
                if db.scrub_pending():
                    db.scrub(tries=2)
            keyring = cls(
                db,
                issuer_key=issuer_key,
                period_kek=period_kek,
                subject_kek=subject_kek,
                retention=retention,
                clock=clock,
            )
            keyring._issuer.redate()
        except BaseException:
            db.close()
            raise
        return keyring

    @property
    def issuer_public(self) -> bytes:
        """The Ed25519 public key that period records are checked with."""
        return self._issuer.public

    def node_keys(self) -> NodeKeys:
        """What a sealer needs, with the issuer at hand: it makes periods as they come."""
        return self._node

    def job_keys(self) -> JobKeys:
        """What an opener needs."""
        return self._job

    def lookup_key(self, tenant: str) -> bytes:
        """The tenant's lookup key, made where missing; durable before this returns."""
        return self._node.lookup_key(tenant)

    def ensure_period(self, tenant: str, at_s: float) -> PeriodRecord:
        """The signed record of the tenant's period that contains `at_s`, made where missing."""
        return self._issuer.ensure_period(tenant, at_s)

    def period(self, period_id: bytes) -> PeriodRecord | None:
        """The record of a period, or None where its key is destroyed."""
        return period_rows.by_id(self._db, period_id)

    def periods(self) -> list[PeriodRecord]:
        """Every living period's record, oldest first."""
        return period_rows.all_records(self._db)

    def aliases_of(self, tenant: str, subject: str) -> list[Alias]:
        """(period id, alias) in every living period that the subject has been seen in."""
        trail = self.trail_of(tenant, subject)
        return [] if trail is None else list(trail.used)

    def trail_of(
        self, tenant: str, subject: str, period_ids: Iterable[bytes] = ()
    ) -> SubjectTrail | None:
        """What the subject is called in every living period and in `period_ids`, living or not.

        None where no key of it exists: it was never seen, or is erased, or every period that it
        was seen in has ended. Then nothing can tell any more what it was called.
        """
        living = [record.period_id for record in period_rows.all_records(self._db, tenant)]
        return self._rows.trail(tenant, self._tag_of(tenant, subject), living, period_ids)

    def destroy_subject(
        self, tenant: str, subject: str, *, planned: Collection[Alias] | None = None
    ) -> int:
        """Destroy a subject's key and aliases; returns the number of keys destroyed (0 or 1).

        `planned` are the aliases that the caller is prepared for: ConflictError, and nothing
        destroyed, where the subject has been seen under another. None prepares for any.

        The rows are deleted, and their bytes gone from keyring.db and its -wal file, when this
        returns; StoreError where the deletion stands but those bytes could not be reached. Safe
        to repeat: a repetition reaches bytes that an interrupted call left.
        """
        tag = self._tag_of(tenant, subject)
        if not self._rows.exists(tenant, SubjectKind.NAMED, tag):
            return self._nothing_destroyed()
        with self._db.erase() as connection:
            # Resolved inside the transaction: a node may just have written another alias. A row
            # too damaged to tell its aliases opens nothing, and has to go all the same.
            aliases: list[Alias] = []
            with suppress(StoreError):
                aliases = self.aliases_of(tenant, subject)
            if planned is not None and not set(aliases) <= set(planned):
                raise ConflictError("the subject was seen in another period meanwhile; plan again")
            connection.executemany("DELETE FROM aliases WHERE period_id = ? AND alias = ?", aliases)
            deleted = connection.execute(
                "DELETE FROM subjects WHERE tenant = ? AND kind = ? AND tag = ?",
                (tenant, int(SubjectKind.NAMED), tag),
            ).rowcount
        return deleted

    def destroy_expired(self, now_s: float) -> int:
        """Destroy every key whose deadline is at or before `now_s`; how many keys that was.

        Periods go with their aliases; subjects, named or anonymous, go when the last period they
        were used in has gone. Many rows go in several commits, the periods in the last, so that no
        seal waits for all of them; a repetition goes on after a kill. Bytes and errors as in
        `destroy_subject`.
        """
        due = self._db.read(
            "SELECT 1 FROM periods WHERE destroy_at_s <= ?1 UNION ALL "
            "SELECT 1 FROM subjects WHERE last_destroy_at_s <= ?1 LIMIT 1",
            (now_s,),
        )
        if not due:
            return self._nothing_destroyed()
        self._destroy_most("aliases", _EXPIRED_ALIASES, now_s)
        destroyed = self._destroy_most("subjects", _EXPIRED_SUBJECTS, now_s)
        with self._db.erase() as connection:
            connection.execute(
                "DELETE FROM aliases WHERE period_id IN "
                "(SELECT period_id FROM periods WHERE destroy_at_s <= ?)",
                (now_s,),
            )
            periods = connection.execute(
                "DELETE FROM periods WHERE destroy_at_s <= ?", (now_s,)
            ).rowcount
            subjects = connection.execute(
                "DELETE FROM subjects WHERE last_destroy_at_s <= ?", (now_s,)
            ).rowcount
        return destroyed + periods + subjects

    def _destroy_most(self, table: str, query: str, now_s: float) -> int:
        """Delete the rows that a query finds, `_CHUNK` in a commit; how many that was."""
        destroyed, deleted = 0, _CHUNK
        while deleted == _CHUNK:
            with self._db.write() as connection:
                deleted = connection.execute(
                    f"DELETE FROM {table} WHERE {query} LIMIT ?)",  # noqa: S608
                    (now_s, _CHUNK),
                ).rowcount
            destroyed += deleted
        return destroyed

    def _tag_of(self, tenant: str, subject: str) -> bytes:
        lookup_key = self._rows.lookup_key(tenant, create=False)
        return b"" if lookup_key is None else names.subject_tag(lookup_key, subject)

    def _nothing_destroyed(self) -> int:
        # The rows may be gone already and only their bytes left, from a call that was interrupted.
        if self._db.scrub_pending():
            self._db.scrub()
        return 0

    def close(self) -> None:
        """Close the keyring's file, and with it both views."""
        self._db.close()
