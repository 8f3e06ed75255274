"""Drops: traces that were to be kept and were lost. Counts only, by source, reason and hour."""

from collections import Counter
from collections.abc import Mapping

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.store.database import insert
from draftkeep.store.schema import drops

HOUR_S = 3600


def add_drops(connection: Connection, source: str, counts: Mapping[str, int], at_s: float) -> None:
    """Add `counts` (reason -> traces) to what `source` dropped in the hour of `at_s`.

    The counts are increments: a caller that keeps totals passes the difference since its last
    call. Committed with the caller's transaction.
    """
    hour_s = int(at_s) // HOUR_S * HOUR_S
    # In one order for all: rows are locked until the commit, and writers must not form a ring.
    for reason, count in sorted(counts.items()):
        if count <= 0:
            continue
        statement = insert(connection, drops).values(
            source=source, reason=reason, hour_s=hour_s, count=count
        )
        connection.execute(
            statement.on_conflict_do_update(
                index_elements=["source", "reason", "hour_s"],
                set_={"count": drops.c.count + statement.excluded["count"]},
            )
        )


def drop_totals(connection: Connection, source: str) -> Counter[str]:
    """How many traces `source` has dropped in all, by reason."""
    row = drops.c
    query = sa.select(row.reason, sa.func.sum(row.count)).where(row.source == source)
    found = connection.execute(query.group_by(row.reason))
    return Counter({reason: int(count) for reason, count in found})
