"""Period records in the catalog: the signed public facts that headers are checked against."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.errors import StoreError
from draftkeep.policies.retention import PeriodRecord
from draftkeep.store.catalog import CHUNK, Catalog
from draftkeep.store.schema import periods


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedPeriod:
    """A period record, and the expiry that headers sealed under its first issue carry."""

    record: PeriodRecord
    issued_expiry_s: int


def publish_period(catalog: Catalog, record: PeriodRecord) -> None:
    """Make a signed period record known to the compactor; call it before the first seal under it.

    Repeating it changes nothing, and waits for no writer; a record with an earlier deadline
    replaces the deadline. Raises StoreError for any other difference, a later deadline included.
    """
    publish_periods(catalog, [record])


def publish_periods(catalog: Catalog, records: Sequence[PeriodRecord]) -> None:
    """Publish what the catalog does not hold yet, new periods and shorter deadlines alike.

    A shorter ttl must reach readers that hold no key. Raises as `publish_period` does.
    """
    with catalog.read() as connection:
        known = load_periods(connection, [record.period_id for record in records])
    for record in records:
        published = known.get(record.period_id)
        if published is None or published.record != record:
            _publish(catalog, record)


def _publish(catalog: Catalog, record: PeriodRecord) -> None:
    with catalog.begin() as connection:
        row = connection.execute(
            sa.select(periods).where(periods.c.period_id == record.period_id)
        ).one_or_none()
        if row is None:
            connection.execute(
                sa.insert(periods).values(
                    period_id=record.period_id,
                    tenant=record.tenant,
                    start_s=record.start_s,
                    destroy_at_s=record.destroy_at_s,
                    issued_expiry_s=record.destroy_at_s,
                    public_key=record.public_key,
                    signature=record.signature,
                )
            )
            return
        _require_shortening(row, record)
        connection.execute(
            sa.update(periods)
            .where(periods.c.period_id == record.period_id)
            .values(destroy_at_s=record.destroy_at_s, signature=record.signature)
        )


def _require_shortening(row: sa.Row[tuple[object, ...]], record: PeriodRecord) -> None:
    known = (row.tenant, row.start_s, row.public_key)
    if known != (record.tenant, record.start_s, record.public_key):
        raise StoreError(
            f"period {record.period_id.hex()} is published with other contents; "
            "an issuer never reuses an id: check which keyring published it"
        )
    if record.destroy_at_s > row.destroy_at_s:
        raise StoreError(
            f"period {record.period_id.hex()} is published with deadline {row.destroy_at_s}, got "
            f"{record.destroy_at_s}; a deadline moves only to an earlier time"
        )


def load_periods(
    connection: Connection, period_ids: Collection[bytes]
) -> dict[bytes, PublishedPeriod]:
    """The published periods among `period_ids`. Signatures are not checked here."""
    found = {}
    for chunk in _chunks(sorted(period_ids)):
        for row in connection.execute(sa.select(periods).where(periods.c.period_id.in_(chunk))):
            record = PeriodRecord(
                tenant=row.tenant,
                period_id=row.period_id,
                start_s=row.start_s,
                destroy_at_s=row.destroy_at_s,
                public_key=row.public_key,
                signature=row.signature,
            )
            found[row.period_id] = PublishedPeriod(
                record=record, issued_expiry_s=row.issued_expiry_s
            )
    return found


def period_ids(connection: Connection, tenant: str) -> Sequence[bytes]:
    """Every period that was ever published for the tenant, ended or not."""
    row = periods.c
    return connection.scalars(sa.select(row.period_id).where(row.tenant == tenant)).all()


def past_periods(now_s: int) -> sa.Select[bytes]:
    """The ids of periods past their deadline that shards which are not may hold traces of.

    A header expires when its period's first issue said, at the latest: these are the periods whose
    deadline was shortened since, and not all that ever ended.
    """
    row = periods.c
    return sa.select(row.period_id).where(row.destroy_at_s <= now_s, row.issued_expiry_s > now_s)


def _chunks(values: list[bytes]) -> Iterator[list[bytes]]:
    for start in range(0, len(values), CHUNK):
        yield values[start : start + CHUNK]
