"""Rows of periods: the record in the clear, the private key wrapped under period.kek."""

from draftkeep.errors import StoreError
from draftkeep.policies.kek import LocalKek
from draftkeep.policies.keyring_db import KeyringDb, Row
from draftkeep.policies.names import lp, text
from draftkeep.policies.retention import PeriodRecord

_FIELDS = "tenant, period_id, start_s, destroy_at_s, public_key, signature"


def by_id(db: KeyringDb, period_id: bytes) -> PeriodRecord | None:
    """The period's record, or None where its row is destroyed or never was."""
    rows = db.read(f"SELECT {_FIELDS} FROM periods WHERE period_id = ?", (period_id,))  # noqa: S608
    return _record(rows[0]) if rows else None


def by_start(db: KeyringDb, tenant: str, start_s: int) -> PeriodRecord | None:
    """The record of the tenant's period that begins at `start_s`, or None."""
    query = f"SELECT {_FIELDS} FROM periods WHERE tenant = ? AND start_s = ?"  # noqa: S608
    rows = db.read(query, (tenant, start_s))
    return _record(rows[0]) if rows else None


def all_records(db: KeyringDb, tenant: str | None = None) -> list[PeriodRecord]:
    """Every living period's record (of one tenant, or of all), oldest first."""
    query = f"SELECT {_FIELDS} FROM periods WHERE ?1 IS NULL OR tenant = ?1"  # noqa: S608
    rows = db.read(f"{query} ORDER BY start_s, tenant", (tenant,))
    return [_record(row) for row in rows]


def private_key(db: KeyringDb, kek: LocalKek, record: PeriodRecord) -> bytes | None:
    """The period's private key, or None where its row is destroyed."""
    query = "SELECT private_wrapped FROM periods WHERE period_id = ?"
    rows = db.read(query, (record.period_id,))
    return kek.unwrap(rows[0][0], wrap_context(record.tenant, record.period_id)) if rows else None


def wrap_context(tenant: str, period_id: bytes) -> bytes:
    """What a wrapped private key is bound to."""
    return b"draftkeep/v1/wrap/period" + lp(text(tenant)) + lp(period_id)


def verified(record: PeriodRecord, issuer_public: bytes) -> PeriodRecord:
    """The same record; StoreError where the issuer did not sign it as it stands."""
    if not record.verify(issuer_public):
        raise StoreError(
            "a period record in keyring.db does not carry the issuer's signature; the row was "
            "altered or issuer.key was replaced: nothing is sealed or opened under it"
        )
    return record


def _record(row: Row) -> PeriodRecord:
    tenant, period_id, start_s, destroy_at_s, public_key, signature = row
    return PeriodRecord(
        tenant=tenant,
        period_id=period_id,
        start_s=start_s,
        destroy_at_s=destroy_at_s,
        public_key=public_key,
        signature=signature,
    )
