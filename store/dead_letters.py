"""Dead letters: records that were refused, kept sealed with the reason until they expire."""

import hashlib
from collections.abc import Iterable

from sqlalchemy.engine import Connection

from draftkeep.ingest.log import PartitionId
from draftkeep.store.admission import Refused
from draftkeep.store.database import insert
from draftkeep.store.schema import dead_letters

# The deadline where a record has none that can be believed: no longer than a default trace.
DEAD_LETTER_TTL_S = 7 * 86400


def add_dead_letters(
    connection: Connection,
    refused: Iterable[Refused],
    *,
    identity: PartitionId,
    now_s: float,
) -> None:
    """Keep refused records. The same bytes for the same reason add to one row's count."""
    cluster, topic_id, partition = identity
    # In one order for all: rows are locked until the commit, and writers must not form a ring.
    for item in sorted(refused, key=lambda item: (str(item.reason), item.data)):
        header = item.header
        latest_s = int(now_s) + DEAD_LETTER_TTL_S
        statement = insert(connection, dead_letters).values(
            reason=str(item.reason),
            detail=item.detail,
            sha256=hashlib.sha256(item.data).digest(),
            count=1,
            record=item.data,
            tenant=None if header is None else header.tenant,
            alias=None if header is None else header.alias,
            cluster=cluster,
            topic=topic_id,
            partition=partition,
            offset=item.offset,
            seen_s=now_s,
            expiry_s=latest_s if header is None else min(header.expiry_s, latest_s),
        )
        connection.execute(
            statement.on_conflict_do_update(
                index_elements=["reason", "sha256"], set_={"count": dead_letters.c.count + 1}
            )
        )
