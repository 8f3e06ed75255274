"""Which of a batch's traces are stored already: the compactor's question before it writes."""

from collections.abc import Iterable, Iterator

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.engine import Connection

from draftkeep.ingest.header import Header
from draftkeep.store.catalog import CHUNK
from draftkeep.store.schema import trace_ids

_ROW = trace_ids.c


def known_digests(
    connection: Connection, headers: Iterable[Header]
) -> dict[tuple[int, bytes, str], bytes]:
    """The digests of those traces that are stored, by expiry bucket, trace id and node.

    There may be more than was asked for: other nodes' traces of the same ids. Reads a row for each
    of them, however many the bucket holds.
    """
    by_bucket: dict[int, set[bytes]] = {}
    for header in headers:
        by_bucket.setdefault(header.expiry_s, set()).add(header.trace_id)
    ask = _chunks if connection.dialect.name == "sqlite" else _one_by_one
    return {
        (bucket_s, found.trace_id, found.node): found.digest
        for bucket_s, ids in by_bucket.items()
        for query in ask(bucket_s, sorted(ids))
        for found in connection.execute(query)
    }


def _chunks(bucket_s: int, ids: list[bytes]) -> Iterator[sa.Select[tuple[bytes, str, bytes]]]:
    for start in range(0, len(ids), CHUNK):
        chunk = ids[start : start + CHUNK]
        yield sa.select(_ROW.trace_id, _ROW.node, _ROW.digest).where(
            _ROW.bucket_s == bucket_s, _ROW.trace_id.in_(chunk)
        )


def _one_by_one(bucket_s: int, ids: list[bytes]) -> Iterator[sa.Select[tuple[bytes, str, bytes]]]:
    """One lookup by the whole key for each id, in one statement, whatever the planner believes.

    PostgreSQL's statistics know nothing of a bucket that began after they were last made. It takes
    such a bucket for empty, and answers a list of ids by reading all of it and comparing each row.
    OFFSET 0 keeps it from doing the same to this join.
    """
    array = sa.literal(ids, postgresql.ARRAY(sa.LargeBinary))
    wanted = sa.func.unnest(array).table_valued("id").render_derived("wanted")
    stored = (
        sa.select(_ROW.trace_id, _ROW.node, _ROW.digest)
        .where(_ROW.bucket_s == bucket_s, _ROW.trace_id == wanted.c.id)
        .offset(sa.literal_column("0"))
        .lateral()
    )
    yield sa.select(stored).select_from(wanted).join(stored, sa.true())
