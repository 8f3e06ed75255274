"""Rows of subjects: lookup keys, subject keys and aliases, all wrapped under subject.kek."""

import os
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from draftkeep.errors import KeyDestroyedError
from draftkeep.policies import names
from draftkeep.policies.kek import LocalKek
from draftkeep.policies.keyring_db import KeyringDb
from draftkeep.policies.names import ID_BYTES, lp, text
from draftkeep.policies.retention import PeriodRecord
from draftkeep.policies.secret_file import KEY_BYTES

Alias = tuple[bytes, bytes]


class SubjectKind(IntEnum):
    """Whether the request named a subject. Others share one key per tenant and period."""

    ANONYMOUS = 0
    NAMED = 1


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class SubjectKey:
    """A subject's 32-byte key, its 16-byte alias in one period, and its `SubjectKind`."""

    key: bytes
    alias: bytes
    kind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectTrail:
    """What a named subject is called, as (period id, alias), while its key lives.

    `used` are the living periods that it was seen in. `others` are the rest of the periods that
    were asked about: its name there, whether it was ever seen in them or not.
    """

    used: tuple[Alias, ...]
    others: tuple[Alias, ...]


class SubjectRows:
    """Reads and writes those rows; holds the subject KEK and nothing in memory besides."""

    def __init__(
        self, db: KeyringDb, kek: LocalKek, *, random: Callable[[int], bytes] = os.urandom
    ) -> None:
        self._db = db
        self._kek = kek
        self._random = random

    def lookup_key(self, tenant: str, *, create: bool) -> bytes | None:
        """The tenant's lookup key; made, durably, where it is missing and `create` allows it."""
        found = self._db.read("SELECT key_wrapped FROM lookups WHERE tenant = ?", (tenant,))
        if not found and create:
            wrapped = self._kek.wrap(self._random(KEY_BYTES), _lookup_context(tenant))
            with self._db.write() as connection:
                connection.execute("INSERT OR IGNORE INTO lookups VALUES (?, ?)", (tenant, wrapped))
            found = self._db.read("SELECT key_wrapped FROM lookups WHERE tenant = ?", (tenant,))
        return self._kek.unwrap(found[0][0], _lookup_context(tenant)) if found else None

    def find(self, tenant: str, kind: SubjectKind, tag: bytes) -> tuple[bytes, bytes] | None:
        """(row id, subject key) of a subject that exists, else None."""
        rows = self._db.read(
            "SELECT subject_id, key_wrapped FROM subjects "
            "WHERE tenant = ? AND kind = ? AND tag = ?",
            (tenant, int(kind), tag),
        )
        if not rows:
            return None
        return rows[0][0], self._kek.unwrap(rows[0][1], _subject_context(tenant, kind, tag))

    def exists(self, tenant: str, kind: SubjectKind, tag: bytes) -> bool:
        """Whether there is such a row, be its key readable or not."""
        query = "SELECT 1 FROM subjects WHERE tenant = ? AND kind = ? AND tag = ?"
        return bool(self._db.read(query, (tenant, int(kind), tag)))

    def used_in(self, alias: bytes, period_id: bytes) -> bool:
        """Whether the alias has been written in the period, and with it the subject's last use."""
        query = "SELECT 1 FROM aliases WHERE alias = ? AND period_id = ?"
        return bool(self._db.read(query, (alias, period_id)))

    def trail(
        self, tenant: str, tag: bytes, living: Sequence[bytes], more: Iterable[bytes]
    ) -> SubjectTrail | None:
        """A named subject's aliases in these living periods and in `more`; None without its row."""
        found = self.find(tenant, SubjectKind.NAMED, tag)
        if found is None:
            return None
        called = {one: names.alias(found[1], tenant, one) for one in (*living, *more)}
        used = {one: called[one] for one in living if self.used_in(called[one], one)}
        others = tuple(pair for pair in called.items() if pair[0] not in used)
        return SubjectTrail(used=tuple(used.items()), others=others)

    def first_use(self, record: PeriodRecord, kind: SubjectKind, tag: bytes) -> SubjectKey:
        """Insert or read the subject, write its alias and its last use there: one commit."""
        with self._db.write() as connection:
            alive = connection.execute(
                "SELECT start_s, destroy_at_s FROM periods WHERE period_id = ?", (record.period_id,)
            ).fetchone()
            if alive is None:
                raise KeyDestroyedError("the period was destroyed; nothing can be sealed in it")
            row_id, key = self._insert_or_read(connection, record.tenant, kind, tag)
            alias = names.alias(key, record.tenant, record.period_id)
            pointer = self._kek.wrap(row_id, _pointer_context(alias, record.period_id))
            connection.execute(
                "INSERT OR IGNORE INTO aliases VALUES (?, ?, ?)", (alias, record.period_id, pointer)
            )
            connection.execute(
                "UPDATE subjects SET last_start_s = max(last_start_s, ?), "
                "last_destroy_at_s = max(last_destroy_at_s, ?) WHERE subject_id = ?",
                (*alive, row_id),
            )
        return SubjectKey(key=key, alias=alias, kind=int(kind))

    def by_alias(self, alias: bytes, period_id: bytes) -> bytes | None:
        """The key of the subject behind an alias, or None where alias or subject is erased."""
        pointers = self._db.read(
            "SELECT pointer_wrapped FROM aliases WHERE alias = ? AND period_id = ?",
            (alias, period_id),
        )
        if not pointers:
            return None
        row_id = self._kek.unwrap(pointers[0][0], _pointer_context(alias, period_id))
        rows = self._db.read(
            "SELECT tenant, kind, tag, key_wrapped FROM subjects WHERE subject_id = ?", (row_id,)
        )
        if not rows:
            return None
        tenant, kind, tag, wrapped = rows[0]
        return self._kek.unwrap(wrapped, _subject_context(tenant, kind, tag))

    def _insert_or_read(
        self, connection: sqlite3.Connection, tenant: str, kind: SubjectKind, tag: bytes
    ) -> tuple[bytes, bytes]:
        found = self.find(tenant, kind, tag)
        if found is not None:
            return found
        row_id, key = self._random(ID_BYTES), self._random(KEY_BYTES)
        wrapped = self._kek.wrap(key, _subject_context(tenant, kind, tag))
        connection.execute(
            "INSERT INTO subjects VALUES (?, ?, ?, ?, ?, 0, 0)",
            (row_id, tenant, int(kind), tag, wrapped),
        )
        return row_id, key


def _lookup_context(tenant: str) -> bytes:
    return b"draftkeep/v1/wrap/lookup" + lp(text(tenant))


def _subject_context(tenant: str, kind: int, tag: bytes) -> bytes:
    return b"draftkeep/v1/wrap/subject" + lp(text(tenant)) + bytes([kind]) + lp(tag)


def _pointer_context(alias: bytes, period_id: bytes) -> bytes:
    return b"draftkeep/v1/wrap/alias" + lp(alias) + lp(period_id)
