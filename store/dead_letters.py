"""Dead letters: records that were refused, kept sealed with the reason until they expire.

Whoever can write to the log can make them, so all of a catalog together are bounded. Beyond the
bound a record is kept by its digest, reason and count alone.
"""

import hashlib
from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.ingest.log import PartitionId
from draftkeep.store.admission import Refused
from draftkeep.store.database import insert
from draftkeep.store.schema import dead_letters, identity, periods

# The longest that a record is kept, where no period tells a shorter lifetime.
DEAD_LETTER_TTL_S = 7 * 86400
# What the records of a catalog's dead letters may take together, each with `ROW_BYTES` for its row.
DEAD_LETTER_BYTES = 64 * 1024**2
ROW_BYTES = 1024


def add_dead_letters(
    connection: Connection,
    refused: Iterable[Refused],
    *,
    log: PartitionId,
    now_s: float,
) -> None:
    """Keep refused records. The same bytes for the same reason add to one row's count.

    Each is kept until the expiry in its header, where that can be read, and no longer than a trace
    that is sealed now.
    """
    # In one order for all: rows are locked until the commit, and writers must not form a ring.
    ordered = sorted(refused, key=lambda item: (str(item.reason), item.data))
    if not ordered:
        return
    free_bytes = DEAD_LETTER_BYTES - _kept_bytes(connection)
    latest_s = int(now_s) + _ttl_s(connection)
    cluster, topic_id, partition = log
    for item in ordered:
        header, record = item.header, item.data
        size_bytes = len(record) + ROW_BYTES
        keep = size_bytes <= free_bytes
        statement = insert(connection, dead_letters).values(
            reason=str(item.reason),
            detail=item.detail,
            sha256=hashlib.sha256(record).digest(),
            count=1,
            record=record if keep else b"",
            kept_bytes=size_bytes if keep else 0,
            tenant=None if header is None else header.tenant,
            alias=None if header is None else header.alias,
            cluster=cluster,
            topic=topic_id,
            partition=partition,
            offset=item.offset,
            seen_s=now_s,
            expiry_s=latest_s if header is None else min(header.expiry_s, latest_s),
        )
        count = connection.scalar(
            statement.on_conflict_do_update(
                index_elements=["reason", "sha256"], set_={"count": dead_letters.c.count + 1}
            ).returning(dead_letters.c.count)
        )
        if keep and count == 1:
            free_bytes -= size_bytes


def _kept_bytes(connection: Connection) -> int:
    """What the records take that are kept, under a lock: two writers must not fill one room."""
    connection.execute(sa.select(identity.c.id).with_for_update())
    size = dead_letters.c.kept_bytes
    # By its index, whose entries above 0 the bound keeps few.
    return int(connection.scalar(sa.select(sa.func.sum(size)).where(size > 0)) or 0)


def _ttl_s(connection: Connection) -> int:
    """The lifetime of the period that ends last, which is the latest, up to `DEAD_LETTER_TTL_S`."""
    row = periods.c
    query = sa.select(row.destroy_at_s - row.start_s).order_by(row.destroy_at_s.desc()).limit(1)
    known_s = connection.scalar(query)
    return DEAD_LETTER_TTL_S if known_s is None else min(int(known_s), DEAD_LETTER_TTL_S)
