"""Which traces are stored already, in buckets that the database's statistics have not heard of."""

import random
from collections.abc import Iterable

import sqlalchemy as sa
from sqlalchemy.engine import Connection

from draftkeep.ingest.header import HEADER_VERSION, Header
from draftkeep.store.catalog import Catalog
from draftkeep.store.database import insert_many
from draftkeep.store.known_digests import known_digests
from draftkeep.store.schema import trace_ids
from tests.store.conftest import TARGET

OLD_S, NEW_S = 1_000_000, 1_003_600


def headers_of(bucket_s: int, ids: Iterable[bytes]) -> list[Header]:
    return [
        Header(
            version=HEADER_VERSION,
            trace_id=trace_id,
            request_id=trace_id,
            tenant="acme",
            period_id=b"P" * 16,
            alias=b"A" * 16,
            subject_kind=0,
            share_id=b"S" * 16,
            target=TARGET,
            tokenizer=b"K" * 32,
            node="n1",
            created_s=bucket_s - 3600,
            expiry_s=bucket_s,
            consent=0,
            policy_version=1,
            origin=0,
            parent_trace_id=None,
            domain=None,
            prompt_tokens=3,
            positions=5,
            body_bytes=4,
            ext=b"",
        )
        for trace_id in ids
    ]


def store(connection: Connection, headers: Iterable[Header], node: str = "n1") -> None:
    rows = [
        {
            "bucket_s": header.expiry_s,
            "trace_id": header.trace_id,
            "node": node,
            "digest": header.trace_id[::-1],
            "tenant": header.tenant,
            "alias": header.alias,
            "period_id": header.period_id,
            "positions": header.positions,
            "shard": None,
        }
        for header in headers
    ]
    insert_many(connection, trace_ids, rows)


def test_what_is_stored_of_what_is_asked_for_and_nothing_else(catalog: Catalog) -> None:
    rng = random.Random(1)
    ids = [rng.randbytes(16) for _ in range(1500)]
    asked = headers_of(NEW_S, ids[500:] + ids[:5]) + headers_of(OLD_S, ids[:950])
    rng.shuffle(asked)
    expected = {
        **{(NEW_S, trace_id, "n1"): trace_id[::-1] for trace_id in ids[500:1000] + ids[:5]},
        **{(NEW_S, trace_id, "n2"): trace_id[::-1] for trace_id in ids[:5]},
        **{(OLD_S, trace_id, "n1"): trace_id[::-1] for trace_id in ids[900:950]},
    }
    with catalog.begin() as connection:
        store(connection, headers_of(NEW_S, ids[:1000]))
        store(connection, headers_of(NEW_S, ids[:10]), node="n2")
        store(connection, headers_of(OLD_S, ids[900:1100]))
        found = known_digests(connection, asked)
        assert known_digests(connection, []) == {}
    assert found == expected


def test_postgresql_reads_no_more_rows_than_it_finds(postgres_catalog_url: str) -> None:
    rng = random.Random(2)
    ids = [rng.randbytes(16) for _ in range(5000)]
    catalog = Catalog.connect(postgres_catalog_url)
    with catalog.begin() as connection:
        for bucket in range(20):
            store(connection, headers_of(OLD_S - bucket, [rng.randbytes(16) for _ in range(500)]))
        connection.exec_driver_sql("ANALYZE trace_ids")
        store(connection, headers_of(NEW_S, ids))
        asked = headers_of(NEW_S, ids[:400])
        before = rows_read(connection)
        assert len(known_digests(connection, asked)) == 400
        assert rows_read(connection) - before == 400
    catalog.close()


def rows_read(connection: Connection) -> int:
    """How many rows of `trace_ids` this transaction has looked at, by index or without."""
    query = sa.text(
        "SELECT seq_tup_read + idx_tup_fetch FROM pg_stat_xact_user_tables "
        "WHERE relname = 'trace_ids'"
    )
    return int(connection.scalar(query) or 0)
