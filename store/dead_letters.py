"""Dead letters: records that were refused, kept sealed with the reason until they expire."""

import hashlib
from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.ingest.log import Log
from draftkeep.store.admission import Refusal, Refused
from draftkeep.store.catalog import Catalog, insert
from draftkeep.store.schema import dead_letters

# The deadline where a record has none that can be believed: no longer than a default trace.
DEAD_LETTER_TTL_S = 7 * 86400
_REQUEUE_RECORDS = 64


def add_dead_letters(
    connection: Connection,
    refused: Iterable[Refused],
    *,
    identity: tuple[str, str, int],
    now_s: float,
) -> None:
    """Keep refused records. The same bytes for the same reason add to one row's count."""
    cluster, topic, partition = identity
    for item in refused:
        header = item.header
        latest_s = int(now_s) + DEAD_LETTER_TTL_S
        statement = insert(connection, dead_letters).values(
            reason=str(item.reason),
            detail=item.detail,
            sha256=hashlib.sha256(item.source.data).digest(),
            count=1,
            record=item.source.data,
            tenant=None if header is None else header.tenant,
            alias=None if header is None else header.alias,
            cluster=cluster,
            topic=topic,
            partition=partition,
            offset=item.source.offset,
            seen_s=now_s,
            expiry_s=latest_s if header is None else min(header.expiry_s, latest_s),
        )
        connection.execute(
            statement.on_conflict_do_update(
                index_elements=["reason", "sha256"], set_={"count": dead_letters.c.count + 1}
            )
        )


def requeue_dead_letters(catalog: Catalog, log: Log, reason: Refusal) -> int:
    """Append the dead letters of one reason to the log again; returns how many.

    For reasons that can be put right afterwards: a node that was enrolled late, a period record
    that was published late. A crash in between appends some twice, which the compactor drops.
    """
    chosen = dead_letters.c.reason == str(reason)
    with catalog.read() as connection:
        total = connection.scalar(
            sa.select(sa.func.count()).select_from(dead_letters).where(chosen)
        )
    moved = 0
    # Bounded by the count at the start: what the compactor refuses again meanwhile stays.
    while moved < (total or 0):
        with catalog.read() as connection:
            rows = connection.execute(
                sa.select(dead_letters.c.id, dead_letters.c.record)
                .where(chosen)
                .order_by(dead_letters.c.id)
                .limit(_REQUEUE_RECORDS)
            ).all()
        if not rows:
            break
        log.append([row.record for row in rows])
        with catalog.begin() as connection:
            connection.execute(
                sa.delete(dead_letters).where(dead_letters.c.id.in_([row.id for row in rows]))
            )
        moved += len(rows)
    return moved
