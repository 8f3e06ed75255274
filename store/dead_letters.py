"""Dead letters: records that were refused, kept sealed with the reason until they expire.

Whoever can write to the log can make them, so all of a catalog together are bounded. What finds no
room is counted by its reason alone.
"""

import hashlib
from collections import Counter
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
# The largest that the column holds.
_MOST = 2**31 - 1


def add_dead_letters(
    connection: Connection,
    refused: Iterable[Refused],
    *,
    log: PartitionId,
    now_s: float,
) -> Counter[str]:
    """Keep refused records; returns how many found no room, by reason.

    The same bytes for the same reason add to one row's count. Each is kept until the expiry in its
    header, where that can be read, and no longer than a trace that is sealed now.
    """
    # In one order for all: rows are locked until the commit, and writers must not form a ring.
    ordered = sorted(refused, key=lambda item: (str(item.reason), item.data))
    without_room: Counter[str] = Counter()
    if not ordered:
        return without_room
    free_bytes = DEAD_LETTER_BYTES - _kept_bytes(connection)
    latest_s = int(now_s) + _ttl_s(connection)
    row = dead_letters.c
    once_more = {"count": sa.case((row.count < _MOST, row.count + 1), else_=_MOST)}
    cluster, topic_id, partition = log
    for item in ordered:
        header, record, reason = item.header, item.data, str(item.reason)
        digest = hashlib.sha256(record).digest()
        size_bytes = len(record) + ROW_BYTES
        if size_bytes > free_bytes:
            again = sa.update(dead_letters).where(row.reason == reason, row.sha256 == digest)
            if not connection.execute(again.values(once_more)).rowcount:
                without_room[reason] += 1
            continue
        statement = insert(connection, dead_letters).values(
            reason=reason,
            detail=item.detail,
            sha256=digest,
            count=1,
            record=record,
            kept_bytes=size_bytes,
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
                index_elements=["reason", "sha256"], set_=once_more
            ).returning(row.count)
        )
        if count == 1:
            free_bytes -= size_bytes
    return without_room


def _kept_bytes(connection: Connection) -> int:
    """What the records take that are kept, under a lock: two writers must not fill one room."""
    connection.execute(sa.select(identity.c.id).with_for_update())
    return int(connection.scalar(sa.select(sa.func.sum(dead_letters.c.kept_bytes))) or 0)


def _ttl_s(connection: Connection) -> int:
    """The lifetime of the period that ends last, which is the latest, up to `DEAD_LETTER_TTL_S`."""
    row = periods.c
    query = sa.select(row.destroy_at_s - row.start_s).order_by(row.destroy_at_s.desc()).limit(1)
    known_s = connection.scalar(query)
    return DEAD_LETTER_TTL_S if known_s is None else min(int(known_s), DEAD_LETTER_TTL_S)
